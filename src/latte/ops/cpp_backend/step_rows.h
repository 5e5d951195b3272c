// What steps of decoding do with the rows of one token, for one instruction set: included by what
// LATTE_FILE names, once per namespace, after rows.h.

// One piece of memory, divided in rows of so many numbers. Each begins at a line of the cache and
// has whole vectors.
template <class T>
static std::vector<T> divided(std::initializer_list<std::pair<T**, int64_t>> rows) {
    constexpr int64_t LINE = 64 / sizeof(T);
    int64_t size = LINE;
    for (auto [row, count] : rows) size += (whole<T>(count) + LINE - 1) / LINE * LINE;
    std::vector<T> memory((size_t(size)));
    T* at = memory.data();
    while (reinterpret_cast<uintptr_t>(at) % (LINE * sizeof(T))) ++at;
    for (auto [row, count] : rows) *row = at, at += (whole<T>(count) + LINE - 1) / LINE * LINE;
    return memory;
}

// A row of a (B, heads, n) tensor, widened.
template <class S, class T>
static void row(const Tensor& x, int64_t b, int64_t head, T* to) {
    gather(x.at<S>() + b * x.strides[0] + head * x.strides[1], x.strides[2], x.sizes[2], to);
}
// The same of a tensor of any dtype: latent logits may be more exact than the values. Log-decays
// may have no batch.
template <class T>
static void logits_of(const Tensor& x, int64_t b, int64_t head, T* to) {
    const int64_t rows = x.dims == 3, *strides = x.strides + rows;
    gather(x, rows * b * x.strides[0] + head * strides[0], strides[1], x.sizes[rows + 1], to);
}

// Turns the pairs (i, i + K/2) of a query or key by the angles of row b.
template <class T>
static void rotate(const Tensor& cosines, const Tensor& sines, int64_t b, T* x) {
    if (!cosines) return;
    auto last = [b](const Tensor& table) {
        const int64_t row = table.sizes[0] > 1 ? b : 0;
        return table.at<T>() + row * table.strides[0] + (table.sizes[2] - 1) * table.strides[2];
    };
    const T *cos = last(cosines), *sin = last(sines);
    const int64_t half = cosines.sizes[3], c = cosines.strides[3], s = sines.strides[3];
    for (int64_t j = 0; j < half; j += width<T>) {
        const int64_t left = half - j;
        const V<T> first = load(x + j, 1, left), second = load(x + j + half, 1, left);
        const V<T> u = load(cos + j * c, c, left), w = load(sin + j * s, s, left);
        store(x + j, first * u - second * w, left);
        store(x + j + half, second * u + first * w, left);
    }
}

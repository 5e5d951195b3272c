// Operations on a row of numbers, for one instruction set: included by what LATTE_FILE names, once
// per namespace. Softmax, RMSNorm, weighted sums of rows and products with them.

// Row `row` of x.
template <class S>
static const S* row_of(const Tensor& x, int64_t row) {
    const S* from = x.at<S>();
    for (int64_t d = x.dims - 2; d >= 0; row /= x.sizes[d--])
        from += row % x.sizes[d] * x.strides[d];
    return from;
}

// As many numbers as whole vectors hold.
template <class T> LATTE_INLINE int64_t whole(int64_t n) {
    return (n + width<T> - 1) / width<T> * width<T>;
}

// Copies elements that are `stride` apart to adjacent places.
template <class S, class T>
static void gather(const S* from, int64_t stride, int64_t count, T* to) {
    if constexpr (sizeof(typename Computed<S>::type) == sizeof(T)) {
        for (int64_t c = 0; c < count; c += width<T>)
            store(to + c, load(from + c * stride, stride, count - c), count - c);
    } else {
        for (int64_t c = 0; c < count; ++c) to[c] = T(widen(from[c * stride]));
    }
}
// The same of a tensor of any dtype, from element `at` on.
template <class T>
static void gather(const Tensor& x, int64_t at, int64_t stride, int64_t count, T* to) {
    by_dtype(x.type(), [&](auto s) { gather(x.at<decltype(s)>() + at, stride, count, to); });
}

// ---- softmax

// Lane numbers 0, 1, ...
template <class T> LATTE_INLINE V<T> lanes() {
    T numbers[width<T>];
    for (int64_t j = 0; j < width<T>; ++j) numbers[j] = T(j);
    return load_all(numbers);
}
// x where first <= place < stop, else y. The lanes' places begin at `at`.
template <class T>
LATTE_INLINE V<T> within(V<T> x, V<T> y, int64_t at, int64_t first, int64_t stop) {
    if (__builtin_expect(at >= first && at + width<T> <= stop, 1)) return x;
    V<T> lane = lanes<T>();
    x = select(lane < T(first - at), y, x);
    return select(lane < T(stop - at), x, y);
}
template <class T> LATTE_INLINE T largest(V<T> x) {
    T numbers[width<T>];
    store_all(numbers, x);
    for (int64_t n = width<T> / 2; n; n /= 2)
        for (int64_t j = 0; j < n; ++j)
            numbers[j] = numbers[j + n] > numbers[j] ? numbers[j + n] : numbers[j];
    return numbers[0];
}
#if LATTE_WIDTH == 64  // in registers
LATTE_INLINE float largest(V<float> x) {
    return folded(larger(x, V<float>{x.high, x.low}).low,
                  [](__m128 a, __m128 b) { return _mm_max_ps(b, a); });
}
#endif

// Columns first ... stop of a row.
struct Span {
    int64_t first, stop;
};

// Calls work(c, span) for every vector of the two spans; the second begins at a whole vector.
template <class T, class Work>
LATTE_INLINE void vectors(Span one, Span two, const Work& work) {
    for (int64_t c = one.first / width<T> * width<T>; c < one.stop; c += width<T>) work(c, one);
    for (int64_t c = two.first; c < two.stop; c += width<T>) work(c, two);
}

// The logits of two spans become exp(x - top), with their sum: all 0 if every one is -inf.
template <class T> struct Exponentials {
    T top, sum;
};
template <class T>
static Exponentials<T> exponentiate(T* x, Span one, Span two) {
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    V<T> tops = all(lowest), sums{};
    vectors<T>(one, two, [&](int64_t c, Span s) {
        tops = larger(tops, within(load_all(x + c), all(lowest), c, s.first, s.stop));
    });
    T top = largest(tops);
    if (top == lowest) top = 0;
    vectors<T>(one, two, [&](int64_t c, Span s) {
        V<T> e = within(decay(load_all(x + c) - top).kept, V<T>{}, c, s.first, s.stop);
        sums = sums + e;
        store_all(x + c, e);
    });
    return {top, sum(sums)};
}
// Makes them sum to `factor`.
template <class T>
static void normalise(T* x, Span one, Span two, T total, T factor) {
    const T share = total == T(0) ? T(0) : factor / total;
    vectors<T>(one, two, [&](int64_t c, Span s) {
        store_all(x + c, within(load_all(x + c) * share, V<T>{}, c, s.first, s.stop));
    });
}
template <class T>
static void soften(T* x, Span one, Span two, T factor) {
    normalise(x, one, two, exponentiate(x, one, two).sum, factor);
}
// The logsumexp of logits that were exponentiated.
template <class T> LATTE_INLINE T log_mass_of(Exponentials<T> found) {
    return found.sum == T(0) ? -std::numeric_limits<T>::infinity()
                             : found.top + std::log(found.sum);
}

// ---- RMSNorm

// y = x s (offset + w) with s = 1 / sqrt(mean(x^2) + eps), which is returned. The elements of w are
// `stride` apart.
template <class S, class T>
static T norm_row(const T* x, const S* weight, int64_t stride, T eps, T offset, int64_t size,
                  S* y) {
    V<T> squares{};
    for (int64_t c = 0; c < size; c += width<T>) {
        const V<T> at = load(x + c, 1, size - c);
        squares = squares + at * at;
    }
    const T scale = T(1) / std::sqrt(sum(squares) / T(size) + eps);
    for (int64_t c = 0; c < size; c += width<T>) {
        const V<T> w = load(weight + c * stride, stride, size - c);
        store(y + c, load(x + c, 1, size - c) * scale * (w + offset), size - c);
    }
    return scale;
}

// ---- many rows at once

// Products of x, padded with zeros to whole vectors, with `count` rows next to each other: to[j],
// for whole halves of vectors. The sum of a row does not depend on its place. Rows that are not
// `wanted` (null: all are) may have any number.
template <class S, class T>
static void products(const T* x, const S* rows, int64_t size, int64_t count, const bool* wanted,
                     T* to) {
    using Numbers = typename Raw<T>::numbers;
    constexpr int64_t together = half_width<T>, lane = lane_width<T>, groups = together / lane;
    const int64_t inner = size / width<T> * width<T>;
    for (int64_t j = 0; j < count; j += together) {
        if (wanted && !std::memchr(wanted + j, 1, size_t(std::min(together, count - j)))) continue;
        Numbers found[groups];
        for (int64_t g = 0; g < groups; ++g) {
            V<T> sums[lane] = {};
            const S* row[lane];
            for (int64_t i = 0; i < lane; ++i)
                row[i] = rows + std::min(j + g * lane + i, count - 1) * size;
            for (int64_t c = 0; c < inner; c += width<T>) {
                const V<T> at = load_all(x + c);
#pragma GCC unroll 4
                for (int64_t i = 0; i < lane; ++i) sums[i] = sums[i] + at * load_all(row[i] + c);
            }
            for (int64_t i = 0; i < lane && inner < size; ++i)
                sums[i] = sums[i] + load_all(x + inner) * load(row[i] + inner, 1, size - inner);
            Numbers halves[lane];
#pragma GCC unroll 4
            for (int64_t i = 0; i < lane; ++i) halves[i] = sums[i].low + sums[i].high;
            found[g] = fold<T, 1, lane>(halves);
        }
        const Numbers every = fold<T, lane, together>(found);
        std::memcpy(to + j, &every, sizeof every);
    }
}

// Calls work(N, c) for the columns of rows of `size`: N vectors from column c on, as many as stay
// in registers. The last may be a part of a vector, with N = 1.
template <class T, class Work>
LATTE_INLINE void in_columns(int64_t size, const Work& work) {
    for (int64_t c = 0; c < size;) {
        const int64_t fit = (size - c) / width<T>;
        if (fit >= 4) work(std::integral_constant<int, 4>(), c), c += 4 * width<T>;
        else if (fit >= 2) work(std::integral_constant<int, 2>(), c), c += 2 * width<T>;
        else work(std::integral_constant<int, 1>(), c), c += width<T>;
    }
}

// Adds `count` rows, each times its weight, to the N vectors from `to` on. Rows are `step` apart;
// `left` is what there is of them. Those of weight 0 are not read.
template <int N, class S, class T>
static void add_columns(const T* weights, const S* rows, int64_t step, int64_t count, int64_t left,
                        T* to) {
    V<T> sums[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[n] = load_all(to + n * width<T>);
    for (int64_t j = 0; j < count; ++j, rows += step) {
        const T weight = weights[j];
        if (weight == T(0)) continue;
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const S* at = rows + n * width<T>;
            sums[n] = sums[n] + (N > 1 ? load_all(at) : load(at, 1, left)) * weight;
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_all(to + n * width<T>, sums[n]);
}
// Adds rows of `size`, each times its weight, to `to`, which has whole vectors.
template <class S, class T>
static void add_rows(const T* weights, const S* rows, int64_t size, int64_t count, T* to) {
    in_columns<T>(size, [&](auto vectors_of, int64_t c) {
        add_columns<vectors_of>(weights, rows + c, size, count, size - c, to + c);
    });
}

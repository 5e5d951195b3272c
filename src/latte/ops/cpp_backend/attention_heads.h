// Gradients of keys and values from those of heads that share them. AVX-512 does it for pairs too.

#if LATTE_PAIRS
using avx512::add_heads;
#else
// (X, T, H, n) -> (X, T, G, n): the sums over the heads of a group, in their order.
template <class T, class S>
static void add_heads_as(const Tensor& x, const Tensor& to) {
    const int64_t n = x.sizes[3], G = to.sizes[2], R = x.sizes[2] / G;
    parallel(x.sizes[0] * x.sizes[1] * G, 64, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            for (int64_t c = 0; c < n; c += width<T>) {
                V<T> total = load(x.at<T>() + i * R * n + c, 1, n - c);
                for (int64_t r = 1; r < R; ++r)
                    total = total + load(x.at<T>() + (i * R + r) * n + c, 1, n - c);
                store(to.at<S>() + i * n + c, total, n - c);
            }
    });
}
static void add_heads(const Tensor& x, const Tensor& to) {
    by_dtype(to.type(), [&](auto one) {
        using S = decltype(one);
        add_heads_as<typename Computed<S>::type, S>(x, to);
    });
}
#endif

// Products of small matrices, and loads and stores of the rows of one head.

// Rows of a tile. 12 vectors of sums, 2 of b and one of a fill 16 registers. Sums of pairs have the
// 32 of AVX-512, and one whole tile less in a chunk.
constexpr int64_t ROWS = PAIR == 1 ? 6 : 8;

// c (M rows of one V) = a b, or added to it: k factors per element in one order, whatever M is.
template <int M, class T, class F>
static void tile_rows(T* c, int64_t ldc, bool add, const F* a, int64_t row, int64_t step,
                      const F* b, int64_t ldb, int64_t k) {
    using Numbers = typename Raw<T>::numbers;
    Numbers low[M], high[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
        V<T> before = add ? load_all(c + m * ldc) : V<T>{};
        low[m] = before.low, high[m] = before.high;
    }
    for (; k > 0; --k, a += step, b += ldb) {
        Numbers left, right;
        std::memcpy(&left, b, sizeof left);
        std::memcpy(&right, b + half_width<T>, sizeof right);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const F x = a[m * row];
            add_products(low[m], left, x), add_products(high[m], right, x);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) store_all(c + m * ldc, V<T>{low[m], high[m]});
}

template <class T, class F>
static void tile(int64_t rows, T* c, int64_t ldc, bool add, const F* a, int64_t row, int64_t step,
                 const F* b, int64_t ldb, int64_t k) {
    switch (rows) {
        case 1: return tile_rows<1>(c, ldc, add, a, row, step, b, ldb, k);
        case 2: return tile_rows<2>(c, ldc, add, a, row, step, b, ldb, k);
        case 3: return tile_rows<3>(c, ldc, add, a, row, step, b, ldb, k);
        case 4: return tile_rows<4>(c, ldc, add, a, row, step, b, ldb, k);
        case 5: return tile_rows<5>(c, ldc, add, a, row, step, b, ldb, k);
        case 6: return tile_rows<6>(c, ldc, add, a, row, step, b, ldb, k);
        case 7: return tile_rows<7>(c, ldc, add, a, row, step, b, ldb, k);
        default: return tile_rows<8>(c, ldc, add, a, row, step, b, ldb, k);
    }
}

LATTE_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
LATTE_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// c (rows of half a V) = a b, of few columns: a whole one's other half would be wasted.
template <int M, class T, class F>
static void half_tile_rows(T* c, int64_t ldc, const F* a, int64_t lda, const F* b, int64_t ldb,
                           int64_t k) {
    typename Raw<T>::numbers sums[M] = {}, right;
    for (; k > 0; --k, ++a, b += ldb) {
        std::memcpy(&right, b, sizeof right);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) add_products(sums[m], right, a[m * lda]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) std::memcpy(c + m * ldc, &sums[m], sizeof right);
}
template <class T, class F>
static void half_product(T* c, int64_t ldc, int64_t rows, const F* a, int64_t lda, const F* b,
                         int64_t ldb, int64_t k) {
    int64_t i = 0;
    for (; i + 8 <= rows; i += 8) half_tile_rows<8>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k);
    for (; i < rows; ++i) half_tile_rows<1>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k);
}

// c (rows, columns of whole V's) = a b, or added to it.
template <class T, class F>
static void product(T* c, int64_t ldc, bool add, int64_t rows, int64_t columns, const F* a,
                    int64_t row, int64_t step, const F* b, int64_t ldb, int64_t k) {
    for (int64_t d = 0; d < columns; d += width<T>)
        for (int64_t i = 0; i < rows; i += ROWS)
            tile(least(ROWS, rows - i), c + i * ldc + d, ldc, add, a + i * row, row, step, b + d,
                 ldb, k);
}

#if LATTE_WIDTH == 64
// In every 16 bytes the lower, or the upper, pairs of two vectors.
LATTE_INLINE __m512 low_pairs(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
LATTE_INLINE __m512 high_pairs(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
// 16 rows of 16 numbers of 4 bytes: what were rows are columns.
LATTE_INLINE void turn_block(__m512 (&x)[16]) {
    __m512 y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)  // x[i + e] has columns e, 4 + e, 8 + e, 12 + e of four rows
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = low_pairs(y[i + j], y[i + 2 + j]);
            x[i + 2 * j + 1] = high_pairs(y[i + j], y[i + 2 + j]);
        }
    for (int e = 0; e < 4; ++e) {
        const __m512 a = _mm512_shuffle_f32x4(x[e], x[4 + e], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(x[e], x[4 + e], 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(x[8 + e], x[12 + e], 0x88);
        const __m512 d = _mm512_shuffle_f32x4(x[8 + e], x[12 + e], 0xdd);
        y[e] = _mm512_shuffle_f32x4(a, c, 0x88), y[8 + e] = _mm512_shuffle_f32x4(a, c, 0xdd);
        y[4 + e] = _mm512_shuffle_f32x4(b, d, 0x88), y[12 + e] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; ++i) x[i] = y[i];
}
#endif

// Rows first ... stop of x (., m) as columns of `to`. Both have rows of whole vectors; around the
// columns, and above and below the rows, numbers up to half a vector may be copied too.
template <class F>
static void transpose(const F* x, int64_t ldx, int64_t first, int64_t stop, int64_t m, F* to,
                      int64_t ld) {
#if LATTE_WIDTH == 64
    if constexpr (sizeof(F) == 4) {
        for (int64_t i = first / 16 * 16; i < stop; i += 16)
            for (int64_t j = 0; j < m; j += 16) {
                __m512 block[16];
#pragma GCC unroll 16
                for (int r = 0; r < 16; ++r) block[r] = _mm512_loadu_ps(x + (i + r) * ldx + j);
                turn_block(block);
                const int64_t count = least(16, m - j);
                if (__builtin_expect(count == 16, 1)) {
#pragma GCC unroll 16
                    for (int r = 0; r < 16; ++r) _mm512_storeu_ps(to + (j + r) * ld + i, block[r]);
                } else {
                    for (int r = 0; r < count; ++r)
                        _mm512_storeu_ps(to + (j + r) * ld + i, block[r]);
                }
            }
        return;
    }
#endif
    for (int64_t i = first; i < stop; ++i)
        for (int64_t j = 0; j < m; ++j) to[j * ld + i] = x[i * ldx + j];
}

// Rows first ... stop of x (., n), turned into panels: of every width<T> rows (n, width<T>).
template <class T, class F>
static void turn(const F* x, int64_t ld, int64_t first, int64_t stop, int64_t n, F* panels) {
    constexpr int64_t W = width<T>;
    for (int64_t i = first / W * W; i < stop; i += W)
        transpose(x + i * ld, ld, most(0, first - i), least(W, stop - i), n, panels + i * n, W);
}

template <class T> LATTE_INLINE bool any(Mask<T> x) {
    const auto both = x.low | x.high;
    uint64_t bits[sizeof both / 8], found = 0;
    std::memcpy(bits, &both, sizeof both);
    for (uint64_t some : bits) found |= some;
    return found;
}

// Whether one of these numbers, in whole vectors, is not finite.
template <class T>
static bool not_finite(const T* x, int64_t count) {
    V<T> nothing{};
    for (int64_t c = 0; c < count; c += width<T>) nothing = nothing + load_all(x + c) * T(0);
    return sum(nothing) != T(0);
}

// Where a token's row of one head begins, in elements.
LATTE_INLINE int64_t place(const Tensor& x, int64_t row, int64_t token, int64_t head) {
    return row * x.strides[0] + token * x.strides[1] + head * x.strides[2];
}

// Calls work(S{}) for the inputs of sums of type T: S is the type of their elements.
template <class T, class Work>
LATTE_INLINE void by_input(Type type, const Work& work) {
    if constexpr (sizeof(T) == 8) return work(double{});
    else if (type == Type::BF16) work(bf16{});
    else if (type == Type::F16) work(fp16{});
    else work(float{});
}

// Tokens of one head as rows of T, zeros up to ld.
template <class T, class S>
static void take_as(const Tensor& x, int64_t row, int64_t token, int64_t head, int64_t count, T* to,
                    int64_t ld, T factor) {
    const int64_t n = x.sizes[3], stride = x.strides[3];
    for (int64_t i = 0; i < count; ++i, to += ld) {
        const S* from = x.at<S>() + place(x, row, token + i, head);
        for (int64_t c = 0; c < ld; c += width<T>)
            store_all(to + c, c < n ? load(from + c * stride, stride, n - c) * factor : V<T>{});
    }
}
template <class T>
static void take(const Tensor& x, int64_t row, int64_t token, int64_t head, int64_t count, T* to,
                 int64_t ld, T factor = T(1)) {
    by_input<T>(x.type(), [&](auto s) {
        take_as<T, decltype(s)>(x, row, token, head, count, to, ld, factor);
    });
}

template <class T>
LATTE_INLINE void clear(T* x, int64_t count) {
    std::memset(x, 0, size_t(count) * sizeof(T));
}
template <class T>
LATTE_INLINE void copy(T* to, const T* from, int64_t count) {
    std::memcpy(to, from, size_t(count) * sizeof(T));
}
// Rows of n numbers; `step` and `to_step` are the distances from a row to the next.
template <class T>
LATTE_INLINE void copy_rows(T* to, int64_t to_step, const T* from, int64_t step, int64_t rows,
                            int64_t n) {
    for (int64_t i = 0; i < rows; ++i) copy(to + i * to_step, from + i * step, n);
}

// The inverse; x is contiguous.
template <class T, class S>
static void put_as(const Tensor& x, int64_t row, int64_t token, int64_t head, int64_t count,
                   const T* from, int64_t ld) {
    const int64_t n = x.sizes[3];
    for (int64_t i = 0; i < count; ++i, from += ld) {
        S* to = x.at<S>() + place(x, row, token + i, head);
        for (int64_t c = 0; c < n; c += width<T>) store(to + c, load_all(from + c), n - c);
    }
}
template <class T>
static void put(const Tensor& x, int64_t row, int64_t token, int64_t head, int64_t count,
                const T* from, int64_t ld) {
    by_input<T>(x.type(),
                [&](auto s) { put_as<T, decltype(s)>(x, row, token, head, count, from, ld); });
}

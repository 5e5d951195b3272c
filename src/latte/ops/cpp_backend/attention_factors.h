// What attention's large products multiply: numbers or, with AVX512-BF16, pairs of bf16.
//
// The instruction multiplies two pairs and adds both products, which are exact, to a sum in fp32. A
// pair holds two neighbours of the dimension that is summed over: of a row's columns (`along`), or
// of one column's rows (`across`). Queries, keys, values and dy are bf16 in memory, so that nothing
// is lost; weights and gradients of scores are rounded to bf16. The latents' state, what is added
// to it and read from it stay in fp32. Subnormal numbers count as 0 in these products.

#if LATTE_PAIRS
struct Pair {
    uint32_t bits;  // the first one in the lower half
};
template <class T> using Factor = Pair;
constexpr int64_t PAIR = 2;
#else
template <class T> using Factor = T;
constexpr int64_t PAIR = 1;
#endif

// Factors that hold n numbers.
LATTE_INLINE int64_t factors(int64_t n) { return (n + PAIR - 1) / PAIR; }

// sums += x times the factors in a vector's bits.
LATTE_INLINE void add_products(typename Raw<float>::numbers& sums,
                               typename Raw<float>::numbers bits, float x) {
    sums += bits * x;
}
LATTE_INLINE void add_products(typename Raw<double>::numbers& sums,
                               typename Raw<double>::numbers bits, double x) {
    sums += bits * x;
}
#if LATTE_PAIRS
LATTE_INLINE void add_products(typename Raw<float>::numbers& sums,
                               typename Raw<float>::numbers bits, Pair x) {
    sums = (typename Raw<float>::numbers)_mm512_dpbf16_ps(
        (__m512)sums, (__m512bh)bits, (__m512bh)_mm512_set1_epi32(int32_t(x.bits)));
}
#endif

#if LATTE_PAIRS
// Where rows of numbers are kept until they are factors: in the factors' place if they are numbers.
template <class T> LATTE_INLINE T* numbers_of(Factor<T>*, T* room) { return room; }

// Rows begin ... end of x, columns first ... stop, as factors of a product over the columns, in
// rows of ld / PAIR. In whole vectors.
template <class T>
LATTE_INLINE const Factor<T>* along(const T* x, int64_t ld, int64_t begin, int64_t end,
                                    int64_t first, int64_t stop, Factor<T>* to) {
    for (int64_t i = begin; i < end; ++i)
        for (int64_t c = first / width<T> * width<T>; c < stop; c += width<T>) {
            const V<T> row = load_all(x + i * ld + c);
            const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)row.high, (__m512)row.low);
            std::memcpy(to + (i * ld + c) / 2, &pairs, sizeof pairs);
        }
    return to;
}

// The same as factors of a product over the rows, in rows of ld. A last row without a neighbour
// has zeros beside it; a first one has the row before it.
template <class T>
LATTE_INLINE const Factor<T>* across(const T* x, int64_t ld, int64_t begin, int64_t end,
                                     int64_t first, int64_t stop, Factor<T>* to) {
    int16_t order[2 * half_width<T>];
    for (int j = 0; j < 2 * half_width<T>; ++j) order[j] = int16_t(j / 2 + (j % 2) * half_width<T>);
    const __m512i places = _mm512_loadu_si512(order);
    for (int64_t i = begin / 2 * 2; i < end; i += 2)
        for (int64_t c = first / width<T> * width<T>; c < stop; c += width<T>) {
            const V<T> one = load_all(x + i * ld + c);
            const V<T> two = i + 1 < end ? load_all(x + (i + 1) * ld + c) : V<T>{};
            const __m512i low = (__m512i)_mm512_cvtne2ps_pbh((__m512)two.low, (__m512)one.low);
            const __m512i high = (__m512i)_mm512_cvtne2ps_pbh((__m512)two.high, (__m512)one.high);
            Factor<T>* at = to + i / 2 * ld + c;
            _mm512_storeu_si512(at, _mm512_permutexvar_epi16(places, low));
            _mm512_storeu_si512(at + half_width<T>, _mm512_permutexvar_epi16(places, high));
        }
    return to;
}
#else
template <class T> LATTE_INLINE T* numbers_of(T* own, T*) { return own; }
template <class T>
LATTE_INLINE const T* along(const T* x, int64_t, int64_t, int64_t, int64_t, int64_t, T*) {
    return x;
}
template <class T>
LATTE_INLINE const T* across(const T* x, int64_t, int64_t, int64_t, int64_t, int64_t, T*) {
    return x;
}
#endif

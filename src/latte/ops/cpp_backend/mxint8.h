// Rows of slots: numbers of any dtype, or packed in 8 bits (latte/ops/mxint8.py). A packed row has
// `size` integers, then a stored exponent for each 32 of them. Included once per namespace, after
// simd.h.

struct mxint8 {
    int8_t bits;
};
constexpr int64_t MX_BLOCK = 32, MX_LEAST = 8, MX_STEP = 6;

// Elements of a row of `size` numbers.
template <class R> LATTE_INLINE int64_t row_size(int64_t size) {
    if constexpr (std::is_same_v<R, mxint8>) return size + (size + MX_BLOCK - 1) / MX_BLOCK;
    return size;
}

LATTE_INLINE float power_of_two(int64_t stored) {
    const auto bits = uint32_t(stored) << 23;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// What an integer of 1 is worth.
LATTE_INLINE float mx_scale(mxint8 exponent) {
    const int64_t stored = uint8_t(exponent.bits);
    if (__builtin_expect(stored == 255, 0)) return std::numeric_limits<float>::quiet_NaN();
    return power_of_two(std::max(stored, MX_LEAST) - MX_STEP);
}

LATTE_INLINE V<float> load_integers(const mxint8* from, float) {
#if LATTE_WIDTH == 64
    const auto half = [from](int64_t at) {
        const __m128i few = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
        return (typename Raw<float>::numbers)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(few));
    };
    return {half(0), half(half_width<float>)};
#elif LATTE_WIDTH == 32
    const auto half = [from](int64_t at) {
        const __m128i few = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + at));
        return (typename Raw<float>::numbers)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(few));
    };
    return {half(0), half(half_width<float>)};
#else
    float x[width<float>];
    for (int64_t i = 0; i < width<float>; ++i) x[i] = from[i].bits;
    return load_all(x);
#endif
}
LATTE_INLINE V<double> load_integers(const mxint8* from, double) {
    double x[width<double>];
    for (int64_t i = 0; i < width<double>; ++i) x[i] = from[i].bits;
    return load_all(x);
}

// A vector of the numbers of a row of `size`, from number c on. What is beyond the row is 0. All
// lanes have one exponent: a vector has at most 32.
template <class T, class R>
LATTE_INLINE V<T> load_row(const R* row, int64_t size, int64_t c) {
    if constexpr (std::is_same_v<R, mxint8>) {
        const T scale = mx_scale(row[size + c / MX_BLOCK]);
        if (__builtin_expect(size - c >= width<T>, 1)) return load_integers(row + c, T()) * scale;
        mxint8 few[width<T>] = {};
        std::copy(row + c, row + size, few);
        V<T> x = load_integers(few, T()) * scale;
        return within(x, V<T>{}, 0, 0, size - c);
    } else {
        return load(row + c, 1, size - c);
    }
}
template <class R, class T>
static void read_row(const R* row, int64_t size, T* to) {
    if constexpr (std::is_same_v<R, mxint8>)
        for (int64_t c = 0; c < size; c += width<T>)
            store(to + c, load_row<T>(row, size, c), size - c);
    else gather(row, 1, size, to);
}

// Packs up to 32 numbers. The loops have 32 steps, so that compilers make vectors of them.
template <class T>
static void write_block(const T* x, int64_t count, mxint8* to, mxint8* exponent) {
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    constexpr T half = sizeof(T) == 8 ? T(0x1.8p52) : T(0x1.8p23);  // adding it rounds
    T few[MX_BLOCK] = {}, top;
    std::copy(x, x + count, few);
    Bits most = 0;  // numbers without a sign are in the order of their bits, NaN last
    for (const T& number : few) {
        Bits bits;
        std::memcpy(&bits, &number, sizeof bits);
        most = std::max(most, Bits(bits << 1) >> 1);
    }
    std::memcpy(&top, &most, sizeof top);
    const auto narrow_top = float(top);
    uint32_t bits;
    std::memcpy(&bits, &narrow_top, 4);
    const int64_t stored = std::max(int64_t(bits >> 23), MX_LEAST);
    const T factor = power_of_two(2 * 127 + MX_STEP - stored);
    mxint8 made[MX_BLOCK];
    for (int64_t i = 0; i < MX_BLOCK; ++i) {
        T at = few[i] * factor;
        at = at < T(-127) ? T(-127) : at;
        at = at > T(127) ? T(127) : at;
        at = at == at ? at : T(0);
        made[i].bits = int8_t((at + half) - half);
    }
    std::copy(made, made + count, to);
    exponent->bits = narrow_top == 0 ? 0 : int8_t(stored);
}

// Writes numbers. Packed ones are rounded to type S before. x is overwritten.
template <class S, class R, class T>
static void write_row(T* x, int64_t size, R* to) {
    if constexpr (std::is_same_v<R, mxint8>) {
        if constexpr (!std::is_same_v<S, T>)
            for (int64_t i = 0; i < size; ++i) {
                S number;
                narrow(typename Computed<S>::type(x[i]), number), x[i] = T(widen(number));
            }
        for (int64_t c = 0, block = 0; c < size; c += MX_BLOCK, ++block)
            write_block(x + c, std::min(MX_BLOCK, size - c), to + c, to + size + block);
    } else if constexpr (std::is_same_v<typename Computed<R>::type, T>) {
        for (int64_t c = 0; c < size; c += width<T>)
            store(to + c, load(x + c, 1, size - c), size - c);
    } else {
        for (int64_t i = 0; i < size; ++i) narrow(typename Computed<R>::type(x[i]), to[i]);
    }
}

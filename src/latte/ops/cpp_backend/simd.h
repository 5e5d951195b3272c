// Vectors for one instruction set: included by each_isa.h, once per namespace. V<float> and
// V<double> are the types of all arithmetic. Each is a pair of vectors of LATTE_WIDTH bytes in the
// compiler's own types: two independent chains of operations hide each other's latency. bf16 and
// fp16 exist only in memory.

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

template <class T> struct Raw;
template <> struct Raw<float> {
    typedef float numbers __attribute__((vector_size(LATTE_WIDTH)));
    typedef int32_t integers __attribute__((vector_size(LATTE_WIDTH)));
    typedef uint16_t halves __attribute__((vector_size(LATTE_WIDTH / 2)));
};
template <> struct Raw<double> {
    typedef double numbers __attribute__((vector_size(LATTE_WIDTH)));
    typedef int64_t integers __attribute__((vector_size(LATTE_WIDTH)));
};
// Lanes of a half of a V<T>, and of all of it.
template <class T> constexpr int64_t half_width = LATTE_WIDTH / sizeof(T);
template <class T> constexpr int64_t width = 2 * half_width<T>;

template <class T> struct Mask {
    typename Raw<T>::integers low, high;
};
template <class T> struct V {
    typename Raw<T>::numbers low, high;
};

template <class T> LATTE_INLINE V<T> all(T x) {
    typename Raw<T>::numbers none{};
    return {none + x, none + x};
}
#define LATTE_OPERATOR(op)                                                                \
    template <class T> LATTE_INLINE V<T> operator op(V<T> x, V<T> y) {                    \
        return {x.low op y.low, x.high op y.high};                                        \
    }                                                                                     \
    template <class T> LATTE_INLINE V<T> operator op(V<T> x, T y) { return x op all(y); } \
    template <class T> LATTE_INLINE V<T> operator op(T x, V<T> y) { return all(x) op y; }
LATTE_OPERATOR(+)
LATTE_OPERATOR(-)
LATTE_OPERATOR(*)
LATTE_OPERATOR(/)
#undef LATTE_OPERATOR
template <class T> LATTE_INLINE V<T> operator-(V<T> x) { return {-x.low, -x.high}; }
template <class T> LATTE_INLINE Mask<T> operator<(V<T> x, V<T> y) {
    return {x.low < y.low, x.high < y.high};
}
template <class T> LATTE_INLINE Mask<T> operator<(V<T> x, T y) { return x < all(y); }
template <class T> LATTE_INLINE V<T> select(Mask<T> where, V<T> x, V<T> y) {
    return {where.low ? x.low : y.low, where.high ? x.high : y.high};
}
// If one is NaN: y is the smaller, x the larger one.
template <class T> LATTE_INLINE V<T> smaller(V<T> x, V<T> y) { return select(x < y, x, y); }
template <class T> LATTE_INLINE V<T> larger(V<T> x, V<T> y) { return select(x < y, y, x); }
#if LATTE_WIDTH == 32  // compilers take two instructions each
LATTE_INLINE V<float> smaller(V<float> x, V<float> y) {
    return {(typename Raw<float>::numbers)_mm256_min_ps((__m256)x.low, (__m256)y.low),
            (typename Raw<float>::numbers)_mm256_min_ps((__m256)x.high, (__m256)y.high)};
}
LATTE_INLINE V<float> larger(V<float> x, V<float> y) {
    return {(typename Raw<float>::numbers)_mm256_max_ps((__m256)y.low, (__m256)x.low),
            (typename Raw<float>::numbers)_mm256_max_ps((__m256)y.high, (__m256)x.high)};
}
#endif

// Calls work(S{}), S the elements of a tensor of that dtype.
template <class Work>
LATTE_INLINE void by_dtype(Type type, const Work& work) {
    switch (type) {
        case Type::F32: return work(float{});
        case Type::F64: return work(double{});
        case Type::BF16: return work(bf16{});
        case Type::F16: return work(fp16{});
    }
}

// The type of the arithmetic on elements that are S in memory.
template <class S> struct Computed {
    using type = float;
};
template <> struct Computed<double> {
    using type = double;
};

LATTE_INLINE float widen(fp16 x) {
    uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu, bits;
    float result;
    if (rest >= 0x7c00u) {
        bits = 0x7f800000u | (rest << 13);
    } else {  // scaled by 2^-112 as bits, which is exact also for subnormal numbers
        bits = rest << 13;
        std::memcpy(&result, &bits, 4);
        result *= 0x1p112f;
        std::memcpy(&bits, &result, 4);
    }
    bits |= sign;
    std::memcpy(&result, &bits, 4);
    return result;
}
LATTE_INLINE float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
LATTE_INLINE float widen(float x) { return x; }
LATTE_INLINE double widen(double x) { return x; }

// Rounds to the nearest, ties to even.
LATTE_INLINE void narrow(float x, float& to) { to = x; }
LATTE_INLINE void narrow(double x, double& to) { to = x; }
LATTE_INLINE void narrow(float x, bf16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
LATTE_INLINE void narrow(float x, fp16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) {
        rest = 0x7e00;
    } else if (rest >= 0x477ff000u) {  // rounds to 65536 or above
        rest = 0x7c00;
    } else if (rest < 0x38800000u) {  // subnormal: adding 0.5 rounds at the last place
        float y;
        std::memcpy(&y, &rest, 4);
        y += 0.5f;
        std::memcpy(&rest, &y, 4);
        rest -= 0x3f000000u;
    } else {
        rest = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1)) >> 13;
    }
    to.bits = uint16_t(sign | rest);
}

// Whole vectors of neighbouring elements.
// (Half by half: compilers copy the pair in smaller pieces, which then cannot be read as vectors.)
template <class T> LATTE_INLINE V<T> load_all(const T* from) {
    typename Raw<T>::numbers low, high;
    std::memcpy(&low, from, sizeof low);
    std::memcpy(&high, from + half_width<T>, sizeof high);
    return {low, high};
}
LATTE_INLINE typename Raw<float>::numbers load_half(const bf16* from) {
    typename Raw<float>::halves half;
    std::memcpy(&half, from, sizeof half);
    return (typename Raw<float>::numbers)(
        __builtin_convertvector(half, typename Raw<float>::integers) << 16);
}
LATTE_INLINE V<float> load_all(const bf16* from) {
    return {load_half(from), load_half(from + half_width<float>)};
}
#if LATTE_WIDTH == 64
LATTE_INLINE typename Raw<float>::numbers load_half(const fp16* from) {
    __m256i half;
    std::memcpy(&half, from, sizeof half);
    return (typename Raw<float>::numbers)_mm512_cvtph_ps(half);
}
#elif LATTE_WIDTH == 32
LATTE_INLINE typename Raw<float>::numbers load_half(const fp16* from) {
    __m128i half;
    std::memcpy(&half, from, sizeof half);
    return (typename Raw<float>::numbers)_mm256_cvtph_ps(half);
}
#else
LATTE_INLINE typename Raw<float>::numbers load_half(const fp16* from) {
    float x[half_width<float>];
    for (int j = 0; j < half_width<float>; ++j) x[j] = widen(from[j]);
    typename Raw<float>::numbers numbers;
    std::memcpy(&numbers, x, sizeof numbers);
    return numbers;
}
#endif
LATTE_INLINE V<float> load_all(const fp16* from) {
    return {load_half(from), load_half(from + half_width<float>)};
}
template <class T> LATTE_INLINE void store_all(T* to, V<T> x) {
    std::memcpy(to, &x.low, sizeof x.low);
    std::memcpy(to + half_width<T>, &x.high, sizeof x.high);
}
LATTE_INLINE void store_half(bf16* to, typename Raw<float>::numbers x) {
#if LATTE_PAIRS
    // The instruction takes subnormal numbers for 0, and keeps the bits of a NaN.
    constexpr int subnormal = 0x20, not_a_number = 0x81;
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)x, subnormal | not_a_number), 1)) {
        const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
        std::memcpy(to, &rounded, sizeof rounded);
        return;
    }
#endif
    auto bits = (typename Raw<float>::integers)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits = x == x ? bits : bits * 0 + 0x7fc0;
    auto half = __builtin_convertvector(bits, typename Raw<float>::halves);
    std::memcpy(to, &half, sizeof half);
}
LATTE_INLINE void store_all(bf16* to, V<float> x) {
    store_half(to, x.low), store_half(to + half_width<float>, x.high);
}
// A NaN keeps its sign alone.
LATTE_INLINE void store_half(fp16* to, typename Raw<float>::numbers x) {
#if LATTE_WIDTH == 64
    const __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    __m256i half = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    half = _mm256_mask_mov_epi16(half, nan,
                                 _mm256_and_si256(half, _mm256_set1_epi16(int16_t(0xfe00))));
    std::memcpy(to, &half, sizeof half);
#elif LATTE_WIDTH == 32
    const __m256i nan = (__m256i)_mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q);
    const __m128i rest =
        _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    __m128i half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
    half = _mm_andnot_si128(_mm_and_si128(rest, _mm_set1_epi16(0x1ff)), half);
    std::memcpy(to, &half, sizeof half);
#else
    for (int j = 0; j < half_width<float>; ++j) narrow(float(x[j]), to[j]);
#endif
}
LATTE_INLINE void store_all(fp16* to, V<float> x) {
    store_half(to, x.low), store_half(to + half_width<float>, x.high);
}

// The first `count` elements, `stride` apart; the other lanes are 0.
template <class S>
LATTE_INLINE V<typename Computed<S>::type> load(const S* from, int64_t stride, int64_t count) {
    using T = typename Computed<S>::type;
    if (__builtin_expect(stride == 1 && count >= width<T>, 1)) return load_all(from);
    T x[width<T>] = {};
    for (int64_t j = 0; j < width<T> && j < count; ++j) x[j] = widen(from[j * stride]);
    return load_all(x);
}
template <class S>
LATTE_INLINE void store(S* to, V<typename Computed<S>::type> x, int64_t count) {
    using T = typename Computed<S>::type;
    if (__builtin_expect(count >= width<T>, 1)) return store_all(to, x);
    T numbers[width<T>];
    store_all(numbers, x);
    for (int64_t j = 0; j < count; ++j) narrow(numbers[j], to[j]);
}

// The sum of all lanes, in one order.
template <class T> LATTE_INLINE T sum(V<T> x) {
    T numbers[half_width<T>];
    auto both = x.low + x.high;
    std::memcpy(numbers, &both, sizeof both);
    for (int64_t n = half_width<T> / 2; n; n /= 2)
        for (int64_t j = 0; j < n; ++j) numbers[j] += numbers[j + n];
    return numbers[0];
}
#if LATTE_WIDTH == 64
// The same in registers: halves are folded onto each other until one number is left.
template <class Fold>
LATTE_INLINE float folded(typename Raw<float>::numbers x, const Fold& fold) {
    const auto quarter = [&](int n) -> __m128 {
        switch (n) {
            case 0: return _mm512_extractf32x4_ps((__m512)x, 0);
            case 1: return _mm512_extractf32x4_ps((__m512)x, 1);
            case 2: return _mm512_extractf32x4_ps((__m512)x, 2);
            default: return _mm512_extractf32x4_ps((__m512)x, 3);
        }
    };
    __m128 four = fold(fold(quarter(0), quarter(2)), fold(quarter(1), quarter(3)));
    four = fold(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(fold(four, _mm_movehdup_ps(four)));
}
LATTE_INLINE float sum(V<float> x) {
    return folded(x.low + x.high, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
#endif

// Sums of several halves at once, with fewer shuffles than one by one. In every `block` lanes of x
// and y, neighbours of `unit` lanes are added: first those of x, then those of y.
template <class T, int64_t unit, int64_t block>
constexpr int64_t paired(int64_t lane, bool second) {
    const int64_t units = block / unit, at = lane % block / unit;
    const int64_t from = lane / block * block + (2 * at % units + second) * unit + lane % unit;
    return at < units / 2 ? from : from + half_width<T>;
}
template <class T, int64_t unit, int64_t block, size_t... lane>
LATTE_INLINE typename Raw<T>::numbers add_pairs(typename Raw<T>::numbers x,
                                                typename Raw<T>::numbers y,
                                                std::index_sequence<lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, paired<T, unit, block>(lane, false)...) +
           __builtin_shufflevector(x, y, paired<T, unit, block>(lane, true)...);
#else
    using Integers = typename Raw<T>::integers;
    return __builtin_shuffle(x, y, Integers{paired<T, unit, block>(lane, false)...}) +
           __builtin_shuffle(x, y, Integers{paired<T, unit, block>(lane, true)...});
#endif
}
// The sums of the units of each block, of as many halves as a block has units.
template <class T, int64_t unit, int64_t block, size_t count>
LATTE_INLINE typename Raw<T>::numbers fold(const typename Raw<T>::numbers (&x)[count]) {
    if constexpr (count == 1) {
        return x[0];
    } else {
        typename Raw<T>::numbers added[count / 2];
#pragma GCC unroll 4
        for (size_t i = 0; i < count / 2; ++i)
            added[i] = add_pairs<T, unit, block>(x[2 * i], x[2 * i + 1],
                                                 std::make_index_sequence<half_width<T>>());
        return fold<T, unit, block>(added);
    }
}
// Numbers in 16 bytes, within which shuffles are cheapest.
template <class T> constexpr int64_t lane_width = 16 / sizeof(T);

// Element `at` of a tensor of any dtype.
template <class T> LATTE_INLINE T number_at(const Tensor& x, int64_t at) {
    T number{};
    by_dtype(x.type(), [&](auto s) { number = T(widen(x.at<decltype(s)>()[at])); });
    return number;
}

template <double (*f)(double)>
LATTE_INLINE V<double> each(V<double> x) {
    double numbers[width<double>];
    store_all(numbers, x);
    for (double& number : numbers) number = f(number);
    return load_all(numbers);
}
LATTE_INLINE V<double> root(V<double> x) { return each<std::sqrt>(x); }
LATTE_INLINE V<float> root(V<float> x) {
#if LATTE_WIDTH == 64
    return {(typename Raw<float>::numbers)_mm512_sqrt_ps((__m512)x.low),
            (typename Raw<float>::numbers)_mm512_sqrt_ps((__m512)x.high)};
#elif LATTE_WIDTH == 32
    return {(typename Raw<float>::numbers)_mm256_sqrt_ps((__m256)x.low),
            (typename Raw<float>::numbers)_mm256_sqrt_ps((__m256)x.high)};
#elif defined(__x86_64__)
    return {(typename Raw<float>::numbers)_mm_sqrt_ps((__m128)x.low),
            (typename Raw<float>::numbers)_mm_sqrt_ps((__m128)x.high)};
#else
    float numbers[width<float>];
    store_all(numbers, x);
    for (float& number : numbers) number = __builtin_sqrtf(number);
    return load_all(numbers);
#endif
}

// e^x = scale (1 + rest), scale a power of two, for |x| <= 87.3; NaN stays.
struct Power {
    V<float> scale, rest;
};
LATTE_INLINE Power power(V<float> x) {
    // x = n log 2 + r, e^x = 2^n e^r. Adding this leaves n in the last bits, as exponents are kept.
    const float round = 0x1.8p23f + 127;
    V<float> shifted = x * 1.44269504088896341f + round;
    V<float> n = shifted - round;
    V<float> r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    // e^r - 1 = r + p r^2, within 1.4e-8 of it.
    V<float> p = r * 1.3882516e-3f + 8.3665471e-3f;
    for (float term : {4.1667201e-2f, 1.6666543e-1f, 5.0e-1f}) p = p * r + term;
    using Integers = typename Raw<float>::integers;
    using Numbers = typename Raw<float>::numbers;
    V<float> scale = {(Numbers)((Integers)shifted.low << 23),
                      (Numbers)((Integers)shifted.high << 23)};
    return {scale, p * (r * r) + r};
}

// e^x and 1 - e^x for x <= 0, each within 2 ulp, without cancellation; NaN stays. What e^x is below
// the smallest normal number counts as 0. e^x alone also for x up to 80.
template <class T> struct Decay {
    V<T> kept, lost;
};

LATTE_INLINE Decay<double> decay(V<double> x) { return {each<std::exp>(x), -each<std::expm1>(x)}; }
// For x >= -87.
LATTE_INLINE Decay<double> decay_above(V<double> x) { return decay(x); }
LATTE_INLINE Decay<float> decay_above(V<float> x) {
    Power e = power(x);
    return {e.scale * e.rest + e.scale, (all(1.0f) - e.scale) - e.scale * e.rest};
}
LATTE_INLINE Decay<float> decay(V<float> x) {
    Mask<float> none = x < -87.336544f;
    Decay<float> e = decay_above(select(none, all(-87.336544f), x));
    return {select(none, V<float>{}, e.kept), select(none, all(1.0f), e.lost)};
}
// sigmoid(x), without overflow; at least e^-87.
LATTE_INLINE V<float> sigmoid(V<float> x) {
    Power e = power(-larger(smaller(all(87.0f), x), all(-87.0f)));
    return all(1.0f) / (e.scale * e.rest + e.scale + 1.0f);
}
LATTE_INLINE V<double> sigmoid(V<double> x) {
    return all(1.0) / (each<std::exp>(-larger(x, all(-700.0))) + 1.0);
}
// The factor of x in silu(x) = x sigmoid(x). For -infinity it is 0: the product is then NaN, as in
// PyTorch, and stays visible.
template <class T> LATTE_INLINE V<T> silu_factor(V<T> x) {
    return select(x < -std::numeric_limits<T>::max(), V<T>{}, sigmoid(x));
}
template <class T> LATTE_INLINE V<T> tanh(V<T> x) {
    Mask<T> negative = x < T(0);
    Decay<T> twice = decay(select(negative, x, -x) * T(2));
    V<T> found = twice.lost / (twice.kept + T(1));
    return select(negative, -found, found);
}
// The Gaussian error linear unit by its approximation with tanh.
template <class T> LATTE_INLINE V<T> gelu(V<T> x) {
    const V<T> inner = T(0.7978845608028654) * (x + T(0.044715) * x * x * x);  // sqrt(2 / pi)
    return T(0.5) * x * (tanh(inner) + T(1));
}
// log(1 + e), 0 <= e <= 1, within a few ulp however small e is.
LATTE_INLINE V<double> log_one_plus(V<double> e) { return each<std::log1p>(e); }
LATTE_INLINE V<float> log_one_plus(V<float> e) {
    // 2 artanh(s), s = e / (2 + e) <= 1/3.
    V<float> s = e / (e + 2.0f), square = s * s;
    V<float> p = all(1.0f / 15);
    for (float power : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
        p = p * square + power;
    return 2.0f * s * p;
}

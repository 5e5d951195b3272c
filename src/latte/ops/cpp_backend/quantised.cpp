// Products of rows with matrices of integers of 4 or 8 bits, which stay so.
//
//     y = W x,   r + W x,   r + D (act(G n) * (U n)) with n = RMSNorm(x)
//     int4: W = (q - 8) scale + zero, q = 0 ... 15, for each 32 weights of a row of W
//     int8: W = q scale, for each 32 weights of a row of W
//
// Rows of x are rounded to integers of 15 bits, with a scale for each 32 numbers. Each integer is
// 128 a + b with a and b of 8 bits. So all products are those of bytes, and for few rows the time
// is that of reading the weights from memory. 8 bits alone would be seen in a model's perplexity.
// The result of a row of x does not depend on the other rows, nor on how many there are.
//
// The integers are in panels of 16 outputs, in the same order for every processor. A panel has, for
// each 32 inputs, 16 times 4 neighbouring inputs next to each other: of one output after the other.
// A byte of int4 holds two inputs that are 4 apart, the first one in its low bits. A byte of int8
// holds q + 128. The last panel is filled up, whatever is in there.
//
// Shapes: R rows of x, all its dimensions but the last, K inputs, N outputs, G groups of inputs,
// P panels of outputs.
#ifndef LATTE_QUANTISED
#define LATTE_QUANTISED

#include <memory>

#include "maps.h"

namespace latte {

constexpr int64_t PANEL = 16, GROUP = 32;
struct Picked {
    Tensor ids, out;  // (...), (..., K)
    Integers map;     // of 8 bits
};

constexpr int64_t INTEGERS = 65536;  // of a matrix: the fewest for which another thread saves time

}  // namespace latte

#define LATTE_FILE "quantised.cpp"
#define LATTE_FOR_BYTES
#include "each_isa.h"

namespace latte {

static void check_integers(const Expect& expect, const Integers& map, int64_t inputs) {
    expect.that(map.scales.dims == 3 || map.scales.dims == 2,
                "scales must have three dimensions (4 bits) or two (8 bits)");
    const bool four = map.four();
    const int32_t dtype = four ? aoti_torch_dtype_uint8() : aoti_torch_dtype_int8();
    const int64_t G = inputs / GROUP;
    if (four) expect(map.scales, "scales", FLOATS, {G, ANY, 2}, Layout::contiguous);
    else expect(map.scales, "scales", FLOATS, {G, ANY}, Layout::contiguous);
    expect(map.weight, "weight", dtype, {PANEL * map.panels(), four ? inputs / 2 : inputs},
           Layout::contiguous);
    expect.that(inputs % GROUP == 0, "weight must have a multiple of 32 inputs");
}

void check_products(const Expect& expect, Products& op) {
    check_rows(expect, op.x);
    for (int64_t m = 0; m < op.count; ++m) {
        check_integers(expect, op.maps[m], width_of(op.x));
        if (!op.outs[m]) op.outs[m] = Tensor::like(op.x, op.maps[m].outputs());
    }
    expect(op.residual, "residual", op.x.dtype, op.outs[0], Layout::contiguous);
}

void check_network(const Expect& expect, Products& op) {
    check_rows(expect, op.x);
    const int64_t K = width_of(op.x);
    expect(op.norm, "norm", op.x.dtype, {K}, Layout::contiguous);
    for (int64_t m : {0, 1}) check_integers(expect, op.maps[m], K);
    const int64_t M = op.maps[0].outputs();
    expect.that(op.maps[1].outputs() == M, "gate and up must have as many outputs");
    check_integers(expect, op.maps[2], M);
    op.outs[0] = Tensor::like(op.x, op.maps[2].outputs());
    expect.that(!op.adds || op.maps[2].outputs() == K, "down must have as many outputs as x");
}

static Integers integers(Stack& stack) {
    Integers map;
    map.weight = stack.tensor(), map.scales = stack.tensor();
    return map;
}

// (x, weight, scales, ...) -> as many outputs
template <int64_t count>
static void quantised(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Products op;
    op.x = stack.tensor(), op.count = count;
    for (int64_t m = 0; m < count; ++m) op.maps[m] = integers(stack);
    check_products(Expect(count == 1   ? "cpu_quantised"
                          : count == 2 ? "cpu_quantised2"
                                       : "cpu_quantised3"),
                   op);
    run(op);
    if constexpr (count == 1) stack.give(op.outs[0]);
    if constexpr (count == 2) stack.give(op.outs[0], op.outs[1]);
    if constexpr (count == 3) stack.give(op.outs[0], op.outs[1], op.outs[2]);
}

// (x, weight, scales, residual) -> residual + x W^T
static void quantised_add(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Products op;
    op.x = stack.tensor(), op.count = 1, op.maps[0] = integers(stack), op.residual = stack.tensor();
    check_products(Expect("cpu_quantised_add"), op);
    run(op);
    stack.give(op.outs[0]);
}

// (x, norm, eps, offset, gate, its scales, up, its scales, down, its scales, tanh, adds) -> y
static void quantised_mlp(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Products op;
    op.x = stack.tensor(), op.norm = stack.tensor(), op.eps = stack.number();
    op.offset = stack.number(), op.count = 3;
    for (int64_t m = 0; m < 3; ++m) op.maps[m] = integers(stack);
    op.gate = stack.flag() ? Gate::gelu : Gate::silu, op.adds = stack.flag();
    check_network(Expect("cpu_quantised_mlp"), op);
    run_network(op);
    stack.give(op.outs[0]);
}

// (ids, weight, scales) -> rows of the matrix, (..., K)
static void quantised_rows(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Picked op;
    op.ids = stack.tensor();
    Integers map = integers(stack);
    const Expect expect("cpu_quantised_rows");
    expect(op.ids, "ids", aoti_torch_dtype_int64(), op.ids, Layout::contiguous);
    expect.that(map.weight.dims == 2 && map.scales.dims == 2, "scales must have two dimensions");
    check_integers(expect, map, map.weight.sizes[1]);
    expect.between(op.ids, "ids", 0, map.outputs() - 1);
    std::vector<int64_t> shape(op.ids.sizes, op.ids.sizes + op.ids.dims);
    shape.push_back(map.inputs());
    op.out = Tensor::empty(shape.data(), int64_t(shape.size()), map.scales.dtype);
    op.map = std::move(map);
    LATTE_CHOOSE(run_rows)(op);
    stack.give(op.out);
}

void run(Products& op) { LATTE_CHOOSE(run_products)(op); }
void run_network(Products& op) { LATTE_CHOOSE(run_mlp)(op); }

static Register registered_quantised("cpu_quantised", quantised<1>);
static Register registered_quantised2("cpu_quantised2", quantised<2>);
static Register registered_quantised3("cpu_quantised3", quantised<3>);
static Register registered_quantised_add("cpu_quantised_add", quantised_add);
static Register registered_quantised_rows("cpu_quantised_rows", quantised_rows);
static Register registered_quantised_mlp("cpu_quantised_mlp", quantised_mlp);

}  // namespace latte

#else  // once per instruction set

#include "gates.h"
#include "rows.h"

// ---- rows of x in integers

// For each group of 32 numbers: all a, then all b; the scale; the sum of the integers.
struct Rounded {
    int64_t rows, size, groups;
    std::unique_ptr<int8_t[]> integers;
    std::unique_ptr<float[]> scales, sums;

    Rounded(int64_t count, int64_t inputs)
        : rows(count), size(inputs), groups(inputs / GROUP),
          integers(new int8_t[size_t(2 * count * inputs)]),
          scales(new float[size_t(count * groups)]), sums(new float[size_t(count * groups)]) {}

    const int8_t* at(int64_t row, int64_t group) const {
        return integers.get() + 2 * (row * size + group * GROUP);
    }
    // The numbers of a group.
    void put(int64_t row, int64_t group, const float* x) {
        constexpr int64_t step = width<float>;
        const float round = 0x1.8p23f;  // adding this rounds to whole numbers, ties to even
        V<float> tops{}, bad{};
        for (int64_t c = 0; c < GROUP; c += step) {
            const V<float> at = load_all(x + c);
            tops = larger(tops, larger(at, -at)), bad = bad + at * 0.0f;
        }
        const float top = largest(tops);
        const float factor = top > 0 ? 127.0f / top : 0.0f;
        int8_t* to = integers.get() + 2 * (row * size + group * GROUP);
        float a[GROUP], b[GROUP];
        for (int64_t c = 0; c < GROUP; c += step) {
            const V<float> exact = load_all(x + c) * factor, near = exact + round - round;
            store_all(a + c, near), store_all(b + c, (exact - near) * 128.0f + round - round);
        }
        int32_t total = 0;
        for (int64_t c = 0; c < GROUP; ++c) {
            const auto first = int32_t(a[c]), second = int32_t(b[c]);
            to[c] = int8_t(first), to[c + GROUP] = int8_t(second);
            total += 128 * first + second;
        }
        // Infinity and NaN are no integers: then all outputs are NaN.
        scales[size_t(row * groups + group)] = top / (127.0f * 128.0f) + sum(bad);
        sums[size_t(row * groups + group)] = float(total);  // exactly
    }
};

template <class S>
static void round_rows(const Tensor& x, Rounded& to) {
    const int64_t stride = x.strides[x.dims - 1];
    parallel(to.rows, 1 + INTEGERS / (1 + 8 * to.size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const S* from = row_of<S>(x, row);
            float group[GROUP];
            for (int64_t g = 0; g < to.groups; ++g) {
                for (int64_t c = 0; c < GROUP; c += width<float>) {
                    const S* at = from + (g * GROUP + c) * stride;
                    if constexpr (sizeof(S) < 8) store_all(group + c, load(at, stride, GROUP - c));
                    else
                        for (int64_t j = 0; j < width<float>; ++j)
                            group[c + j] = float(at[j * stride]);
                }
                to.put(row, g, group);
            }
        }
    });
}

// ---- products of a panel: 16 outputs of `count` rows, in fp32

// 16 numbers, a lane for each output of a panel.
struct Lanes {
    float at[PANEL];
};

#if LATTE_BYTES  // AVX-512 with products of bytes
constexpr int TOGETHER = 8;  // rows that share the weights in registers

LATTE_INLINE __m512i four_inputs(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}

// 128 a + b
LATTE_INLINE __m512 in_one(__m512i a, __m512i b) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(a, 7), b));
}

template <class S>
LATTE_INLINE void load_scales(const S* from, __m512& scale, __m512& zero) {
    if constexpr (std::is_same_v<S, bf16>) {
        const __m512i pairs = _mm512_loadu_si512(from);
        scale = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        zero = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000))));
    } else {
        float both[2][PANEL];
        for (int64_t n = 0; n < PANEL; ++n)
            both[0][n] = float(widen(from[2 * n])), both[1][n] = float(widen(from[2 * n + 1]));
        scale = _mm512_loadu_ps(both[0]), zero = _mm512_loadu_ps(both[1]);
    }
}

template <class S>
LATTE_INLINE __m512 load_scales(const S* from) {
    if constexpr (std::is_same_v<S, bf16>) {
        const __m256i own = _mm256_loadu_si256((const __m256i*)from);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(own), 16));
    } else {
        float own[PANEL];
        for (int64_t n = 0; n < PANEL; ++n) own[n] = float(widen(from[n]));
        return _mm512_loadu_ps(own);
    }
}

template <int count, class S>
static void four_panel(const uint8_t* weights, const S* scales, int64_t N, const Rounded& x,
                       int64_t first, Lanes* to) {
    const __m512i low_bits = _mm512_set1_epi8(15);
    const float* row_scales = x.scales.get() + first * x.groups;
    const float* row_sums = x.sums.get() + first * x.groups;
    __m512 sums[count];
    for (int r = 0; r < count; ++r) sums[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < x.groups; ++g, weights += 256, scales += 2 * N) {
        __m512i low[4], high[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m512i pairs = _mm512_loadu_si512(weights + 64 * c);
            low[c] = _mm512_and_si512(pairs, low_bits);
            high[c] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low_bits);
        }
        if (count == 1) __builtin_prefetch(scales + 4 * PANEL);  // the weights are in one stream
        __m512 scale, zero;
        load_scales(scales, scale, zero);
        zero = _mm512_fnmadd_ps(scale, _mm512_set1_ps(8.0f), zero);
#pragma GCC unroll 8
        for (int r = 0; r < count; ++r) {
            const int8_t* at = x.at(first + r, g);
            __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) {
                a = _mm512_dpbusd_epi32(a, low[c], four_inputs(at + 8 * c));
                b = _mm512_dpbusd_epi32(b, low[c], four_inputs(at + GROUP + 8 * c));
                a = _mm512_dpbusd_epi32(a, high[c], four_inputs(at + 8 * c + 4));
                b = _mm512_dpbusd_epi32(b, high[c], four_inputs(at + GROUP + 8 * c + 4));
            }
            const __m512 product = in_one(a, b);
            const float own = row_scales[r * x.groups + g];
            const __m512 all_sums = _mm512_set1_ps(row_sums[r * x.groups + g]);
            const __m512 both = _mm512_fmadd_ps(product, scale, _mm512_mul_ps(zero, all_sums));
            sums[r] = _mm512_fmadd_ps(both, _mm512_set1_ps(own), sums[r]);
        }
    }
    for (int r = 0; r < count; ++r) _mm512_storeu_ps(to[r].at, sums[r]);
}

template <int count, class S>
static void eight_panel(const uint8_t* weights, const S* scales, int64_t N, const Rounded& x,
                        int64_t first, Lanes* to) {
    const float* row_scales = x.scales.get() + first * x.groups;
    const float* row_sums = x.sums.get() + first * x.groups;
    __m512 sums[count];
    for (int r = 0; r < count; ++r) sums[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < x.groups; ++g, weights += 512, scales += N) {
        __m512i own[8];
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) own[c] = _mm512_loadu_si512(weights + 64 * c);
        if (count == 1) __builtin_prefetch(scales + 8 * PANEL);
        const __m512 scale = load_scales(scales);
#pragma GCC unroll 8
        for (int r = 0; r < count; ++r) {
            const int8_t* at = x.at(first + r, g);
            __m512i a = _mm512_setzero_si512();
            __m512i b = _mm512_set1_epi32(-128 * int32_t(row_sums[r * x.groups + g]));
#pragma GCC unroll 8
            for (int c = 0; c < 8; ++c) {
                a = _mm512_dpbusd_epi32(a, own[c], four_inputs(at + 4 * c));
                b = _mm512_dpbusd_epi32(b, own[c], four_inputs(at + GROUP + 4 * c));
            }
            const __m512 product = _mm512_mul_ps(in_one(a, b), scale);
            sums[r] =
                _mm512_fmadd_ps(product, _mm512_set1_ps(row_scales[r * x.groups + g]), sums[r]);
        }
    }
    for (int r = 0; r < count; ++r) _mm512_storeu_ps(to[r].at, sums[r]);
}

#else
constexpr int TOGETHER = 4;

#if LATTE_WIDTH > 16  // AVX2, which AVX-512 alone adds nothing to
// The sums of four neighbouring products of 8 outputs.
LATTE_INLINE __m256i four_inputs(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
LATTE_INLINE __m256i wide_sums(__m256i pairs) {
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
// 128 a + b
LATTE_INLINE void put_in_one(__m256i a, __m256i b, int32_t* to) {
    _mm256_storeu_si256((__m256i*)to, _mm256_add_epi32(_mm256_slli_epi32(a, 7), b));
}
LATTE_INLINE void group_of_four(const uint8_t* weights, const int8_t* x, int32_t* to) {
    const __m256i low_bits = _mm256_set1_epi8(15);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        // At most 8 * 2 * 15 * 127, which 16 bits hold.
        __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(weights + 64 * c + 32 * half));
            const __m256i low = _mm256_and_si256(both, low_bits);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
            const int8_t* at = x + 8 * c;
            a = _mm256_add_epi16(a, _mm256_maddubs_epi16(low, four_inputs(at)));
            a = _mm256_add_epi16(a, _mm256_maddubs_epi16(high, four_inputs(at + 4)));
            b = _mm256_add_epi16(b, _mm256_maddubs_epi16(low, four_inputs(at + GROUP)));
            b = _mm256_add_epi16(b, _mm256_maddubs_epi16(high, four_inputs(at + GROUP + 4)));
        }
        put_in_one(wide_sums(a), wide_sums(b), to + 8 * half);
    }
}
LATTE_INLINE void group_of_eight(const uint8_t* weights, const int8_t* x, int32_t, int32_t* to) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        __m256i sums[2] = {};
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) {
            const __m256i q =
                _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(weights + 64 * c + 32 * half)),
                                 _mm256_set1_epi8(-128));
            // |q| and x with the sign of q: the first factors have none.
#pragma GCC unroll 2
            for (int part = 0; part < 2; ++part) {
                const __m256i own = _mm256_sign_epi8(four_inputs(x + part * GROUP + 4 * c), q);
                const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), own);
                sums[part] = _mm256_add_epi32(sums[part], wide_sums(pairs));
            }
        }
        put_in_one(sums[0], sums[1], to + 8 * half);
    }
}
#else
LATTE_INLINE int whole_at(const int8_t* x) { return 128 * x[0] + x[GROUP]; }
LATTE_INLINE void group_of_four(const uint8_t* weights, const int8_t* x, int32_t* to) {
    for (int64_t n = 0; n < PANEL; ++n) to[n] = 0;
    for (int64_t c = 0; c < 4; ++c)
        for (int64_t n = 0; n < PANEL; ++n)
            for (int64_t j = 0; j < 4; ++j) {
                const int both = weights[64 * c + 4 * n + j];
                to[n] += (both & 15) * whole_at(x + 8 * c + j);
                to[n] += (both >> 4) * whole_at(x + 8 * c + 4 + j);
            }
}
LATTE_INLINE void group_of_eight(const uint8_t* weights, const int8_t* x, int32_t total,
                                 int32_t* to) {
    for (int64_t n = 0; n < PANEL; ++n) to[n] = -128 * total;
    for (int64_t c = 0; c < 8; ++c)
        for (int64_t n = 0; n < PANEL; ++n)
            for (int64_t j = 0; j < 4; ++j)
                to[n] += weights[64 * c + 4 * n + j] * whole_at(x + 4 * c + j);
}
#endif

template <int count, class S>
static void four_panel(const uint8_t* weights, const S* scales, int64_t N, const Rounded& x,
                       int64_t first, Lanes* to) {
    for (int r = 0; r < count; ++r) to[r] = {};
    for (int64_t g = 0; g < x.groups; ++g, weights += 256, scales += 2 * N) {
        float scale[PANEL], zero[PANEL];
        for (int64_t n = 0; n < PANEL; ++n) {
            scale[n] = float(widen(scales[2 * n]));
            zero[n] = float(widen(scales[2 * n + 1])) - 8.0f * scale[n];
        }
        for (int r = 0; r < count; ++r) {
            const int64_t at = (first + r) * x.groups + g;
            int32_t found[PANEL];
            group_of_four(weights, x.at(first + r, g), found);
            const float own = x.scales[size_t(at)], all_sums = x.sums[size_t(at)];
            for (int64_t n = 0; n < PANEL; ++n)
                to[r].at[n] += own * (float(found[n]) * scale[n] + zero[n] * all_sums);
        }
    }
}

template <int count, class S>
static void eight_panel(const uint8_t* weights, const S* scales, int64_t N, const Rounded& x,
                        int64_t first, Lanes* to) {
    for (int r = 0; r < count; ++r) to[r] = {};
    for (int64_t g = 0; g < x.groups; ++g, weights += 512, scales += N) {
        float scale[PANEL];
        for (int64_t n = 0; n < PANEL; ++n) scale[n] = float(widen(scales[n]));
        for (int r = 0; r < count; ++r) {
            const int64_t at = (first + r) * x.groups + g;
            int32_t found[PANEL];
            group_of_eight(weights, x.at(first + r, g), int32_t(x.sums[size_t(at)]), found);
            for (int64_t n = 0; n < PANEL; ++n)
                to[r].at[n] += x.scales[size_t(at)] * (float(found[n]) * scale[n]);
        }
    }
}
#endif

// ---- products with a matrix

template <int count, class S>
static void panel(const Integers& map, const S* scales, int64_t N, int64_t p, const Rounded& x,
                  int64_t first, Lanes* to) {
    const uint8_t* weights = map.weight.at<uint8_t>() + p * PANEL * map.weight.sizes[1];
    if (map.four()) four_panel<count>(weights, scales, N, x, first, to);
    else eight_panel<count>(weights, scales, N, x, first, to);
}

// Calls work(the scales of a panel, how many outputs their groups have).
template <class Work>
static void with_scales(const Integers& map, int64_t p, const Work& work) {
    by_dtype(map.scales.type(), [&](auto s) {
        using S = decltype(s);
        const int64_t N = map.outputs(), first = p * PANEL, each = map.four() ? 2 : 1;
        const S* from = map.scales.at<S>() + each * first;
        if (first + PANEL <= N) return work(from, N);
        // The kernels read as many scales as a whole panel has.
        const int64_t groups = map.scales.sizes[0];
        std::vector<S> own(size_t(groups * each * PANEL), S{});
        for (int64_t g = 0; g < groups; ++g)
            std::copy_n(from + g * each * N, each * (N - first), own.data() + g * each * PANEL);
        work(static_cast<const S*>(own.data()), PANEL);
    });
}

// Calls put(row, first output, 16 outputs) for the panels begin ... end and all rows.
template <class Put>
static void in_panels(const Integers& map, const Rounded& x, int64_t begin, int64_t end,
                      const Put& put) {
    Lanes found[TOGETHER];
    for (int64_t p = begin; p < end; ++p)
        with_scales(map, p, [&](const auto* scales, int64_t N) {
            for (int64_t r = 0, count; r < x.rows; r += count) {
                const int64_t left = x.rows - r;
                count = left >= TOGETHER ? TOGETHER : left >= 4 ? 4 : left >= 2 ? 2 : 1;
                if (count == TOGETHER) panel<TOGETHER>(map, scales, N, p, x, r, found);
                else if (count == 4) panel<4>(map, scales, N, p, x, r, found);
                else if (count == 2) panel<2>(map, scales, N, p, x, r, found);
                else panel<1>(map, scales, N, p, x, r, found);
                for (int64_t n = 0; n < count; ++n) put(r + n, p * PANEL, found[n]);
            }
        });
}

// The parts of the panels of some matrices, which threads work on: work(matrix, begin, end).
template <class Work>
static void each_panel(const Integers* maps, int64_t count, const Work& work) {
    int64_t panels = 0;
    for (int64_t m = 0; m < count; ++m) panels += maps[m].panels();
    const int64_t grain = 1 + INTEGERS / (1 + PANEL * maps[0].inputs());
    parallel(panels, grain, [&](int64_t begin, int64_t end) {
        int64_t first = 0;
        for (int64_t m = 0; begin < end; first += maps[m++].panels()) {
            const int64_t stop = std::min(end, first + maps[m].panels());
            if (begin < stop) work(m, begin - first, stop - first), begin = stop;
        }
    });
}

template <class S>
static void narrow_lanes(const Lanes& found, int64_t count, const S* residual, S* to) {
    for (int64_t n = 0; n < PANEL && n < count; ++n) {
        const auto y = typename Computed<S>::type(found.at[n]);
        narrow(residual ? y + widen(residual[n]) : y, to[n]);
    }
}

static void run_products(Products& op) {
    by_dtype(op.x.type(), [&](auto s) {
        using S = decltype(s);
        Rounded x(rows_of(op.x), op.maps[0].inputs());
        round_rows<S>(op.x, x);
        each_panel(op.maps, op.count, [&](int64_t m, int64_t begin, int64_t end) {
            const int64_t N = op.maps[m].outputs();
            S* out = op.outs[m].at<S>();
            const S* residual = op.residual ? op.residual.at<S>() : nullptr;
            in_panels(op.maps[m], x, begin, end, [&](int64_t r, int64_t n, const Lanes& found) {
                const S* own = residual ? residual + r * N + n : nullptr;
                narrow_lanes(found, N - n, own, out + r * N + n);
            });
        });
    });
}

static void run_rows(Picked& op) {
    by_dtype(op.map.scales.type(), [&](auto s) {
        using S = decltype(s);
        using T = typename Computed<S>::type;
        const int64_t K = op.map.inputs(), N = op.map.outputs(), count = count_of(op.ids);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t n = op.ids.at<int64_t>()[i];
            const uint8_t* own =
                op.map.weight.at<uint8_t>() + n / PANEL * PANEL * K + n % PANEL * 4;
            S* to = op.out.at<S>() + i * K;
            for (int64_t k = 0; k < K; ++k) {
                const int q = own[k / 4 * 4 * PANEL + k % 4] - 128;
                narrow(T(q) * T(widen(op.map.scales.at<S>()[k / GROUP * N + n])), to[k]);
            }
        }
    });
}

static void run_mlp(Products& op) {
    by_dtype(op.x.type(), [&](auto s) {
        using S = decltype(s);
        using T = typename Computed<S>::type;
        const int64_t R = rows_of(op.x), K = op.maps[0].inputs(), M = op.maps[0].outputs();
        const int64_t N = op.maps[2].outputs(), stride = op.x.strides[op.x.dims - 1];
        Rounded x(R, K), inner(R, M);
        std::vector<T> from(size_t(K), T(0));
        std::vector<S> normed(size_t(K), S{});
        for (int64_t r = 0; r < R; ++r) {
            gather(row_of<S>(op.x, r), stride, K, from.data());
            norm_row(from.data(), op.norm.at<S>(), 1, T(op.eps), T(op.offset), K, normed.data());
            for (int64_t g = 0; g < x.groups; ++g) {
                float group[GROUP];
                for (int64_t j = 0; j < GROUP; ++j)
                    group[j] = float(widen(normed[size_t(g * GROUP + j)]));
                x.put(r, g, group);
            }
        }
        const std::unique_ptr<float[]> both(new float[size_t(2 * R * M)]);
        each_panel(op.maps, 2, [&](int64_t m, int64_t begin, int64_t end) {
            float* to = both.get() + m * R * M;
            in_panels(op.maps[m], x, begin, end, [&](int64_t r, int64_t n, const Lanes& found) {
                std::memcpy(to + r * M + n, &found, sizeof found);
            });
        });
        for (int64_t r = 0; r < R; ++r)
            for (int64_t g = 0; g < inner.groups; ++g) {
                const float *gate = both.get() + r * M + g * GROUP, *up = gate + R * M;
                float group[GROUP];
                for (int64_t c = 0; c < GROUP; c += width<float>) {
                    const V<float> y = load_all(gate + c);
                    const V<float> bent = op.gate == Gate::silu ? y * silu_factor(y) : gelu(y);
                    store_all(group + c, bent * load_all(up + c));
                }
                inner.put(r, g, group);
            }
        each_panel(op.maps + 2, 1, [&](int64_t, int64_t begin, int64_t end) {
            in_panels(op.maps[2], inner, begin, end, [&](int64_t r, int64_t n, const Lanes& found) {
                S residual[PANEL];
                for (int64_t j = 0; op.adds && j < PANEL && j < N - n; ++j)
                    residual[j] = row_of<S>(op.x, r)[(n + j) * stride];
                S* out = op.outs[0].at<S>() + r * N + n;
                narrow_lanes(found, N - n, op.adds ? residual : nullptr, out);
            });
        });
    });
}

#endif

// The kernels of attention for one instruction set, in fp32 and in fp64: T is the type of the sums.

#include "rows.h"
#include "memory.h"
#include "attention_factors.h"
#include "attention_tiles.h"

namespace of_float {
using T = float;
#include "attention_walks.h"
}  // namespace of_float
#if !LATTE_PAIRS
namespace of_double {
using T = double;
#include "attention_walks.h"
}  // namespace of_double
#endif

#if LATTE_PAIRS
// Only bf16 gains by pairs.
static void run_forward(const Attention& op) {
    if (op.v.type() == Type::BF16) of_float::run_forward_in(op);
    else avx512::run_forward(op);
}
static void run_backward(const Attention& op) {
    if (op.v.type() == Type::BF16) of_float::run_backward_in(op);
    else avx512::run_backward(op);
}
using avx512::add_heads;
#else
static void run_forward(const Attention& op) {
    if (op.v.type() == Type::F64) return of_double::run_forward_in(op);
    of_float::run_forward_in(op);
}

static void run_backward(const Attention& op) {
    if (op.v.type() == Type::F64) return of_double::run_backward_in(op);
    of_float::run_backward_in(op);
}

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

// The kernels of attention with kept tokens for one instruction set, in fp32 and in fp64: T is the
// type of the sums.

#include "rows.h"
#include "memory.h"
#include "attention_factors.h"
#include "attention_tiles.h"

namespace of_float {
using T = float;
#include "kept_walks.h"
}  // namespace of_float
#if !LATTE_PAIRS
namespace of_double {
using T = double;
#include "kept_walks.h"
}  // namespace of_double
#endif

#if LATTE_PAIRS
// Only bf16 gains by pairs.
static void run_forward(const KeptAttention& op) {
    if (op.v.type() == Type::BF16) of_float::run_forward_in(op);
    else avx512::run_forward(op);
}
static void run_backward(const KeptAttention& op) {
    if (op.v.type() == Type::BF16) of_float::run_backward_in(op);
    else avx512::run_backward(op);
}
using avx512::narrow_all;
#else
static void run_forward(const KeptAttention& op) {
    if (op.v.type() == Type::F64) return of_double::run_forward_in(op);
    of_float::run_forward_in(op);
}
static void run_backward(const KeptAttention& op) {
    if (op.v.type() == Type::F64) return of_double::run_backward_in(op);
    of_float::run_backward_in(op);
}

// The same numbers in another dtype; both contiguous.
static void narrow_all(const Tensor& x, const Tensor& to) {
    by_dtype(to.type(), [&](auto one) {
        using S = decltype(one);
        using T = typename Computed<S>::type;
        const int64_t count = x.bytes() / int64_t(sizeof(T));
        parallel(count, 1 << 14, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i += width<T>)
                store(to.at<S>() + i, load(x.at<T>() + i, 1, end - i), end - i);
        });
    });
}
#endif

// The kernels of attention for one instruction set, in fp32 and in fp64: T is the type of the sums.
// LATTE_WALKS is the header of its walks, and LATTE_ATTENTION the type of its arguments.

#include "rows.h"
#include "memory.h"
#include "attention_factors.h"
#include "attention_tiles.h"
#include "attention_heads.h"

namespace of_float {
using T = float;
#include LATTE_WALKS
}  // namespace of_float
#if !LATTE_PAIRS
namespace of_double {
using T = double;
#include LATTE_WALKS
}  // namespace of_double
#endif

#if LATTE_PAIRS
// Only bf16 gains by pairs.
static void run_forward(const LATTE_ATTENTION& op) {
    if (op.v.type() == Type::BF16) of_float::run_forward_in(op);
    else avx512::run_forward(op);
}
static void run_backward(const LATTE_ATTENTION& op) {
    if (op.v.type() == Type::BF16) of_float::run_backward_in(op);
    else avx512::run_backward(op);
}
#else
static void run_forward(const LATTE_ATTENTION& op) {
    if (op.v.type() == Type::F64) return of_double::run_forward_in(op);
    of_float::run_forward_in(op);
}

static void run_backward(const LATTE_ATTENTION& op) {
    if (op.v.type() == Type::F64) return of_double::run_backward_in(op);
    of_float::run_backward_in(op);
}
#endif

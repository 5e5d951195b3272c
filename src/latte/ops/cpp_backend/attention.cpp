// The ops of attention: their arguments, their checks and their results (attention_op.h).

#include "attention_op.h"
#include "expect.h"

#define LATTE_FILE "attention_kernels.h"
#define LATTE_WALKS "attention_walks.h"
#define LATTE_ATTENTION Attention
#define LATTE_FOR_PAIRS
#include "each_isa.h"

namespace latte {

// The inputs of an op with latents (far), with a window (near), or with both.
static Attention inputs(Stack& stack, bool far, bool near) {
    Attention op;
    if (far) op.latent_q = stack.tensor(), op.latent_k = stack.tensor();
    if (near) op.q = stack.tensor(), op.k = stack.tensor();
    op.v = stack.tensor(), op.mask = stack.maybe_tensor(), op.bounds = stack.maybe_tensor();
    if (far) {
        op.log_mass = stack.maybe_tensor(), op.mean = stack.maybe_tensor();
        op.log_decay = stack.maybe_tensor();
    }
    if (!near) return op;
    op.tail_k = stack.maybe_tensor(), op.tail_v = stack.maybe_tensor();
    op.tail_mask = stack.maybe_tensor();
    op.sink_q = stack.maybe_tensor(), op.sink_k = stack.maybe_tensor();
    op.sink_v = stack.maybe_tensor(), op.sink_mask = stack.maybe_tensor();
    op.sinks_seen = stack.maybe_tensor();
    if (!far) return op;
    op.pending_k = stack.maybe_tensor(), op.pending_v = stack.maybe_tensor();
    op.pending_mask = stack.maybe_tensor();
    return op;
}

static void numbers(Stack& stack, Attention& op) {
    op.window = op.near() ? stack.integer() : 0;
    op.scale = op.near() ? stack.number() : 0.0, op.softcap = op.near() ? stack.number() : 0.0;
    const bool both = op.near() && op.far();
    op.causal = op.far() || stack.flag();
    op.delay = both && stack.flag() ? op.window : 0;
    op.joint = both && stack.flag();
}

static void check_inputs(const Expect& expect, const Attention& op) {
    const int32_t dtype = op.v.dtype, boolean = aoti_torch_dtype_bool();
    const Layout plain = Layout::contiguous;
    expect(op.v, "v", FLOATS, {ANY, ANY, ANY, ANY});
    expect(op.far() ? op.latent_k : op.q, op.far() ? "latent_k" : "q", dtype, {ANY, ANY, ANY, ANY});
    const int64_t B = op.batch(), T = op.tokens(), H = op.heads(), G = op.groups();
    const int64_t L = op.latents(), D = op.v.sizes[3];
    const int32_t sums = wide(op.v);
    expect.that(H >= 1 && G >= 1 && D >= 1 && (L >= 1 || !op.far()),
                "heads, latents and widths must be at least 1");
    expect.that(H % G == 0, "the heads of v must divide those of the queries");
    expect.sequences(op.v, op.mask, op.bounds);
    const int64_t N = op.sequences();
    expect(op.latent_k, "latent_k", dtype, {B, T, H, L});
    expect(op.latent_q, "latent_q", dtype, {B, T, H, L + op.near()});
    expect.together({&op.log_mass, &op.mean}, "log_mass and mean");
    expect(op.log_mass, "log_mass", sums, {N, H, L}, plain);
    expect(op.mean, "mean", sums, {N, H, L, D}, plain);
    expect(op.log_decay, "log_decay", sums, {B, T, H, L});
    if (!op.near()) return;
    expect(op.q, "q", dtype, {B, T, H, ANY});
    const int64_t K = op.key_width(), W = op.window, S = op.sink_k.size(1);
    expect.that(K >= 1 && W >= 1, "the window and the width of its keys must be at least 1");
    expect.that(op.causal, "causal must be True: there are no kernels of bidirectional windows");
    expect(op.k, "k", dtype, {B, T, G, K});
    expect.together({&op.tail_k, &op.tail_v, &op.tail_mask}, "tail_k, tail_v and tail_mask");
    expect(op.tail_k, "tail_k", dtype, {N, W - 1, G, K});
    expect(op.tail_v, "tail_v", dtype, {N, W - 1, G, D});
    expect(op.tail_mask, "tail_mask", boolean, {N, W - 1}, plain);
    expect.together({&op.sink_q, &op.sink_k, &op.sink_v, &op.sink_mask, &op.sinks_seen},
                    "sink_q, sink_k, sink_v, sink_mask and sinks_seen");
    expect(op.sink_q, "sink_q", dtype, {B, T, H, K});
    expect(op.sink_k, "sink_k", dtype, {N, S, G, K});
    expect(op.sink_v, "sink_v", dtype, {N, S, G, D});
    expect(op.sink_mask, "sink_mask", boolean, {N, S}, plain);
    expect(op.sinks_seen, "sinks_seen", aoti_torch_dtype_int64(), {B, T}, plain);
    expect.between(op.sinks_seen, "sinks_seen", 0, S);
    expect.together({&op.pending_k, &op.pending_v, &op.pending_mask},
                    "pending_k, pending_v and pending_mask");
    expect(op.pending_k, "pending_k", dtype, {N, W, H, L});
    expect(op.pending_v, "pending_v", dtype, {N, W, G, D});
    expect(op.pending_mask, "pending_mask", boolean, {N, W}, plain);
}

static void check_gradients(const Expect& expect, const Attention& op) {
    const int64_t H = op.heads(), L = op.latents(), D = op.v.sizes[3];
    const int64_t N = op.sequences(), M = op.segments();
    const int32_t sums = wide(op.v);
    expect(op.dout, "grad of y", op.v.dtype, {op.batch(), op.tokens(), H, D});
    expect(op.dlast_mass, "grad of log_mass", sums, {N, H, L});
    expect(op.dlast_mean, "grad of mean", sums, {N, H, L, D});
    expect(op.kept_top, "kept_top", sums, {M, H, L}, Layout::contiguous);
    expect(op.kept_mass, "kept_mass", sums, {M, H, L}, Layout::contiguous);
    expect(op.kept_sum, "kept_sum", sums, {M, H, L, D}, Layout::contiguous);
}

static const char* name_of(bool far, bool near, bool back) {
    if (far && near) return back ? "cpu_macchiato_backward" : "cpu_macchiato";
    if (far) return back ? "cpu_latte_backward" : "cpu_latte";
    return back ? "cpu_window_backward" : "cpu_window";
}

// (inputs, window, scale, softcap, then delay and joint, or without latents causal) -> y and, if
// there are latents, log_mass, mean, kept x 3
template <bool far, bool near>
static void forward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Attention op = inputs(stack, far, near);
    numbers(stack, op);
    check_inputs(Expect(name_of(far, near, false)), op);
    const int64_t H = op.heads(), L = op.latents(), D = op.v.sizes[3];
    const int64_t N = op.sequences(), M = op.segments();
    const int32_t dtype = wide(op.v);
    op.out = Tensor::empty({op.batch(), op.tokens(), H, D}, op.v.dtype);
    op.make_plan();
    if (!far) {
        LATTE_CHOOSE(run_forward)(op);
        return stack.give(op.out);
    }
    op.last_mass = Tensor::empty({N, H, L}, dtype);
    op.last_mean = Tensor::empty({N, H, L, D}, dtype);
    op.kept_top = Tensor::empty({M, H, L}, dtype), op.kept_mass = Tensor::empty({M, H, L}, dtype);
    op.kept_sum = Tensor::empty({M, H, L, D}, dtype);
    // Packed sequences may use only some of the segments. The other ones hold defined numbers too.
    if (op.bounds)
        for (Tensor* x : {&op.kept_top, &op.kept_mass, &op.kept_sum}) x->clear();
    if (op.plan.split && op.forgets())
        op.borders.forgotten =
            Tensor::empty({op.borders_in_all(), H, L}, aoti_torch_dtype_float64());
    LATTE_CHOOSE(run_forward)(op);
    stack.give(op.out, op.last_mass, op.last_mean, op.kept_top, op.kept_mass, op.kept_sum);
}

// What the parts of split sequences give to each other in the backward pass.
static void make_borders(Attention& op) {
    const int64_t P = op.borders_in_all(), H = op.heads(), L = op.latents(), S = op.sinks();
    const int64_t K = op.key_width(), D = op.v.sizes[3], rows = op.border_rows();
    const int32_t sums = wide(op.v);
    Borders& to = op.borders;
    if (op.far()) {
        to.reverse = Tensor::empty({P, H, L, D}, sums), to.scalar = Tensor::empty({P, H, L}, sums);
        to.top = Tensor::empty({P, H, L}, sums);
    }
    if (op.forgets()) to.forgotten = Tensor::empty({P, H, L}, aoti_torch_dtype_float64());
    if (!op.near()) return;
    to.dk = Tensor::empty({P, rows, H, K}, sums), to.dv = Tensor::empty({P, rows, H, D}, sums);
    if (!S) return;
    to.dsink_k = Tensor::empty({P, S, H, K}, sums);
    to.dsink_v = Tensor::empty({P, S, H, D}, sums);
}

// (dy and the state's gradients, the inputs, kept x 3, numbers) -> gradients of latent_q, latent_k,
// q, k, v, log_mass, mean, log_decay, the tail's keys and values, the sinks' queries, keys and
// values and the pending sources' keys and values, as far as the op has them, empty for None
template <bool far, bool near>
static void backward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor dout = stack.tensor(), dlast_mass, dlast_mean;
    if (far) dlast_mass = stack.tensor(), dlast_mean = stack.tensor();
    Attention op = inputs(stack, far, near);
    op.dout = static_cast<Tensor&&>(dout), op.dlast_mass = static_cast<Tensor&&>(dlast_mass);
    op.dlast_mean = static_cast<Tensor&&>(dlast_mean);
    if (far)
        op.kept_top = stack.tensor(), op.kept_mass = stack.tensor(), op.kept_sum = stack.tensor();
    numbers(stack, op);
    const Expect expect(name_of(far, near, true));
    check_inputs(expect, op), check_gradients(expect, op);
    const int64_t B = op.batch(), T = op.tokens(), H = op.heads(), G = op.groups();
    const int64_t L = op.latents(), K = op.key_width(), D = op.v.sizes[3], N = op.sequences();
    const int32_t dtype = op.v.dtype, sums = wide(op.v);
    op.make_plan();
    // Heads that share keys and values each compute separate gradients, and so do parts of a
    // sequence at their borders. The sums have a fixed order.
    const int32_t each = H == G && !op.plan.split ? dtype : sums;
    const auto made = [&](bool wanted, std::initializer_list<int64_t> shape, int32_t type) {
        return wanted ? Tensor::empty(shape, type) : Tensor::empty({0}, dtype);
    };
    const bool carried = bool(op.log_mass), tailed = bool(op.tail_k), sinks = bool(op.sink_k);
    const bool pending = bool(op.pending_k);
    const int64_t P = op.tail(), S = op.sinks(), W = op.window;
    op.dv = made(true, {B, T, H, D}, each);
    if (far) {
        op.dlatent_q = made(true, {B, T, H, L + near}, dtype);
        op.dlatent_k = made(true, {B, T, H, L}, dtype);
        op.dlog_mass = made(carried, {N, H, L}, sums);
        op.dmean = made(carried, {N, H, L, D}, sums);
        op.dlog_decay = made(op.forgets(), {B, T, H, L}, sums);
    }
    if (near) {
        op.dq = made(true, {B, T, H, K}, dtype), op.dk = made(true, {B, T, H, K}, each);
        op.dtail_k = made(tailed, {N, P, H, K}, each),
        op.dtail_v = made(tailed, {N, P, H, D}, each);
        op.dsink_q = made(sinks, {B, T, H, K}, dtype);
        op.dsink_k = made(sinks, {N, S, H, K}, each), op.dsink_v = made(sinks, {N, S, H, D}, each);
        op.dpending_k = made(pending, {N, W, H, L}, dtype);
        op.dpending_v = made(pending, {N, W, H, D}, each);
        // No latent has received the sources that are still pending: their gradients are 0.
        op.dpending_k.clear(), op.dpending_v.clear();
    }
    if (op.plan.split) make_borders(op);
    LATTE_CHOOSE(run_backward)(op);
    if (H != G || each != dtype) {
        for (Tensor* x :
             {&op.dk, &op.dv, &op.dtail_k, &op.dtail_v, &op.dsink_k, &op.dsink_v, &op.dpending_v}) {
            if (x->dims < 4) continue;
            Tensor together = Tensor::empty({x->sizes[0], x->sizes[1], G, x->sizes[3]}, dtype);
            LATTE_CHOOSE(add_heads)(*x, together);
            *x = static_cast<Tensor&&>(together);
        }
    }
    if (far && near)
        stack.give(op.dlatent_q, op.dlatent_k, op.dq, op.dk, op.dv, op.dlog_mass, op.dmean,
                   op.dlog_decay, op.dtail_k, op.dtail_v, op.dsink_q, op.dsink_k, op.dsink_v,
                   op.dpending_k, op.dpending_v);
    else if (far)
        stack.give(op.dlatent_q, op.dlatent_k, op.dv, op.dlog_mass, op.dmean, op.dlog_decay);
    else
        stack.give(op.dq, op.dk, op.dv, op.dtail_k, op.dtail_v, op.dsink_q, op.dsink_k, op.dsink_v);
}

static Register registered_macchiato("cpu_macchiato", forward<true, true>);
static Register registered_macchiato_backward("cpu_macchiato_backward", backward<true, true>);
static Register registered_latte("cpu_latte", forward<true, false>);
static Register registered_latte_backward("cpu_latte_backward", backward<true, false>);
static Register registered_window("cpu_window", forward<false, true>);
static Register registered_window_backward("cpu_window_backward", backward<false, true>);

}  // namespace latte

// The op of attention with kept tokens: its arguments, its checks and its results (kept_op.h).

#include "kept_op.h"
#include "expect.h"

#define LATTE_FILE "attention_kernels.h"
#define LATTE_WALKS "kept_walks.h"
#define LATTE_ATTENTION KeptAttention
#define LATTE_FOR_PAIRS
#include "each_isa.h"

namespace latte {

static KeptAttention inputs(Stack& stack) {
    KeptAttention op;
    op.q = stack.tensor(), op.k = stack.tensor(), op.v = stack.tensor();
    for (Tensor* x : {&op.latent_q, &op.latent_k, &op.log_mass, &op.mean, &op.old_k, &op.old_v,
                      &op.old_latent_k, &op.sink_q, &op.sink_k, &op.sink_v, &op.log_decay,
                      &op.old_log_decay, &op.sinks_seen, &op.source})
        *x = stack.maybe_tensor();
    op.kept = stack.tensor(), op.kept_there = stack.tensor();
    op.late = stack.tensor(), op.late_there = stack.tensor(), op.begun = stack.tensor();
    op.age = stack.maybe_tensor(), op.owner = stack.maybe_tensor();
    op.ends = stack.maybe_tensor();
    return op;
}

static void numbers(Stack& stack, KeptAttention& op) {
    op.window = stack.integer(), op.block = stack.integer(), op.front = stack.integer();
    op.scale = stack.number(), op.softcap = stack.number();
}

// Places that are marked as there must be slots of their own row.
static void check_places(const Expect& expect, const KeptAttention& op, const Tensor& places,
                         const Tensor& there, const char* condition) {
    const int64_t each = count_of(places) / op.batch(), row = op.slots() * op.groups();
    bool holds = true;
    for (int64_t i = 0; i < each * op.batch(); ++i) {
        const int64_t place = places.at<int64_t>()[i] - i / each * row;
        if (there.at<bool>()[i]) holds = holds && place >= 0 && place < row;
    }
    expect.that(holds, condition);
}

static void check_inputs(const Expect& expect, const KeptAttention& op) {
    const int32_t dtype = op.v.dtype, boolean = aoti_torch_dtype_bool();
    const int32_t integer = aoti_torch_dtype_int64();
    const Layout plain = Layout::contiguous;
    expect(op.v, "v", FLOATS, {ANY, ANY, ANY, ANY});
    expect(op.q, "q", dtype, {ANY, ANY, ANY, ANY});
    expect(op.kept, "kept", integer, {ANY, ANY, ANY, ANY}, plain);
    const int64_t B = op.batch(), T = op.tokens(), H = op.heads(), G = op.groups();
    const int64_t L = op.latents(), K = op.q.sizes[3], D = op.v.sizes[3], Z = op.blocks();
    const int64_t N = op.states(), M = op.old(), n = op.sinks(), J = op.places(), C = op.block;
    const int64_t S = op.slots();
    const int32_t sums = wide(op.v);
    expect.that(B >= 1 && T >= 1 && H >= 1 && G >= 1 && K >= 1 && D >= 1 && Z >= 1,
                "rows, tokens, heads, widths and blocks must be at least 1");
    expect.that(H % G == 0, "the heads of v must divide those of the queries");
    expect.that(op.window >= 1 && C >= 1, "the window and a block must be at least 1");
    expect.that(op.front >= J, "front must be at least the number of kept places");
    expect(op.k, "k", dtype, {B, T, G, K}), expect(op.v, "v", dtype, {B, T, G, D});
    expect.together({&op.latent_q, &op.latent_k}, "latent_q and latent_k");
    expect(op.latent_k, "latent_k", dtype, {B, T, H, ANY});
    expect.that(!op.far() || L >= 1, "latents must be at least 1");
    expect(op.latent_q, "latent_q", dtype, {B, T, H, L + 1});
    expect.together({&op.log_mass, &op.mean}, "log_mass and mean");
    expect(op.log_mass, "log_mass", sums, {B, H, L}, plain);
    expect(op.mean, "mean", sums, {B, H, L, D}, plain);
    expect.together({&op.old_k, &op.old_v}, "old_k and old_v");
    expect(op.old_k, "old_k", dtype, {B, M, G, K}), expect(op.old_v, "old_v", dtype, {B, M, G, D});
    expect(op.old_latent_k, "old_latent_k", dtype, {B, M, H, L});
    expect.that(!op.old_k || bool(op.old_latent_k) == op.far(),
                "old_latent_k must be given with old_k and latents");
    expect.together({&op.sink_q, &op.sink_k, &op.sink_v, &op.sinks_seen},
                    "sink_q, sink_k, sink_v and sinks_seen");
    expect(op.sink_q, "sink_q", dtype, {B, T, H, K});
    expect(op.sink_k, "sink_k", dtype, {N, n, G, K});
    expect(op.sink_v, "sink_v", dtype, {N, n, G, D});
    expect(op.sinks_seen, "sinks_seen", boolean, {B, Z, n}, plain);
    expect(op.log_decay, "log_decay", sums, {B, T, H, L});
    expect(op.old_log_decay, "old_log_decay", sums, {B, M, H, L});
    expect.that(!op.old_k || bool(op.old_log_decay) == bool(op.log_decay),
                "old_log_decay must be given with old_k and log_decay");
    expect(op.source, "source", integer, {B, S}, plain);
    expect.that(op.source || (!op.old_k && op.front + T <= S),
                "source must be given with old_k, or if not all tokens have slots");
    expect.between(op.source, "source", -1, M + T - 1);
    expect(op.kept, "kept", integer, {B, G, Z, J}, plain);
    expect(op.kept_there, "kept_there", boolean, {B, G, Z, J}, plain);
    expect(op.late, "late", integer, {B, G, Z, C}, plain);
    expect(op.late_there, "late_there", boolean, {B, G, Z, C}, plain);
    expect(op.begun, "begun", boolean, {B, G, Z}, plain);
    check_places(expect, op, op.kept, op.kept_there, "kept must hold places of its own row");
    check_places(expect, op, op.late, op.late_there, "late must hold places of its own row");
    expect.together({&op.age, &op.owner, &op.ends}, "age, owner and ends");
    expect.that(!op.ends || (B == 1 && !op.log_mass),
                "packed sequences need one row, and no state");
    expect(op.age, "age", integer, {Z}, plain), expect(op.owner, "owner", integer, {Z}, plain);
    expect(op.ends, "ends", integer, {N}, plain);
    expect.between(op.age, "age", 0, Z - 1);
    expect.between(op.owner, "owner", 0, N - 1), expect.between(op.ends, "ends", -1, Z - 1);
}

static void forward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    KeptAttention op = inputs(stack);
    numbers(stack, op);
    check_inputs(Expect("cpu_kept"), op);
    op.divide();
    const int64_t B = op.batch(), H = op.heads(), L = op.latents(), D = op.v.sizes[3];
    const int64_t N = op.states(), X = op.segments();
    const int32_t sums = wide(op.v), exact = aoti_torch_dtype_float64();
    const auto made = [&](std::initializer_list<int64_t> shape, int32_t dtype) {
        return op.far() ? Tensor::empty(shape, dtype) : Tensor::empty({0}, dtype);
    };
    op.out = Tensor::empty({B, op.tokens(), H, D}, op.v.dtype);
    op.last_mass = made({N, H, L}, sums), op.last_mean = made({N, H, L, D}, sums);
    op.saved_top = made({B, X, H, L}, exact), op.saved_mass = made({B, X, H, L}, sums);
    op.saved_sum = made({B, X, H, L, D}, sums);
    if (op.source) op.out.clear();  // masked tokens have no slot
    LATTE_CHOOSE(run_forward)(op);
    stack.give(op.out, op.last_mass, op.last_mean, op.saved_top, op.saved_mass, op.saved_sum);
}

static void check_gradients(const Expect& expect, const KeptAttention& op) {
    const int64_t H = op.heads(), L = op.latents(), D = op.v.sizes[3], B = op.batch();
    const int64_t N = op.states(), X = op.segments();
    const int32_t sums = wide(op.v);
    expect(op.dout, "grad of y", op.v.dtype, {B, op.tokens(), H, D});
    if (!op.far()) return;
    expect(op.dlast_mass, "grad of log_mass", sums, {N, H, L});
    expect(op.dlast_mean, "grad of mean", sums, {N, H, L, D});
    expect(op.saved_top, "saved_top", aoti_torch_dtype_float64(), {B, X, H, L}, Layout::contiguous);
    expect(op.saved_mass, "saved_mass", sums, {B, X, H, L}, Layout::contiguous);
    expect(op.saved_sum, "saved_sum", sums, {B, X, H, L, D}, Layout::contiguous);
}

// (dy and the state's gradients, the tensors, saved x 3, numbers) -> gradients of q, k, v,
// latent_q, latent_k, log_mass, mean, old_k, old_v, old_latent_k, the sinks' queries, keys and
// values, log_decay and old_log_decay, empty for None
static void backward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor dout = stack.tensor(), dlast_mass = stack.tensor(), dlast_mean = stack.tensor();
    KeptAttention op = inputs(stack);
    op.dout = static_cast<Tensor&&>(dout), op.dlast_mass = static_cast<Tensor&&>(dlast_mass);
    op.dlast_mean = static_cast<Tensor&&>(dlast_mean);
    op.saved_top = stack.tensor(), op.saved_mass = stack.tensor(), op.saved_sum = stack.tensor();
    numbers(stack, op);
    const Expect expect("cpu_kept_backward");
    check_inputs(expect, op), check_gradients(expect, op);
    op.divide();
    const int32_t sums = wide(op.v);
    // A result like an input. It begins with zeros if the kernel writes only a part of it.
    const auto made = [&](const Tensor& x, int32_t dtype, bool zeros) {
        if (!x) return Tensor::empty({0}, op.v.dtype);
        Tensor found = Tensor::empty(x.sizes, x.dims, dtype);
        if (zeros) found.clear();
        return found;
    };
    const bool partly = bool(op.source);
    op.dq = made(op.q, op.v.dtype, partly), op.dsink_q = made(op.sink_q, op.v.dtype, partly);
    op.dlatent_q = made(op.latent_q, op.v.dtype, partly);
    op.dlatent_k = made(op.latent_k, op.v.dtype, true);
    op.dold_latent_k = made(op.old_latent_k, op.v.dtype, true);
    op.dlog_decay = made(op.log_decay, sums, partly);
    op.dold_log_decay = made(op.old_log_decay, sums, true);
    op.dlog_mass = made(op.log_mass, sums, false), op.dmean = made(op.mean, sums, false);
    // Many blocks add to the gradients of keys and values: each set of heads has its own sums.
    const auto added = [&](const Tensor& x) {
        if (!x) return Tensor::empty({0}, op.v.dtype);
        Tensor found = Tensor::empty({x.sizes[0], x.sizes[1], op.sets, x.sizes[3]}, sums);
        found.clear();
        return found;
    };
    op.dk = added(op.k), op.dv = added(op.v);
    op.dold_k = added(op.old_k), op.dold_v = added(op.old_v);
    op.dsink_k = added(op.sink_k), op.dsink_v = added(op.sink_v);
    LATTE_CHOOSE(run_backward)(op);
    for (Tensor* x : {&op.dk, &op.dv, &op.dold_k, &op.dold_v, &op.dsink_k, &op.dsink_v}) {
        if (x->dims < 4 || (op.sets == op.groups() && sums == op.v.dtype)) continue;
        Tensor whole =
            Tensor::empty({x->sizes[0], x->sizes[1], op.groups(), x->sizes[3]}, op.v.dtype);
        LATTE_CHOOSE(add_heads)(*x, whole);
        *x = static_cast<Tensor&&>(whole);
    }
    stack.give(op.dq, op.dk, op.dv, op.dlatent_q, op.dlatent_k, op.dlog_mass, op.dmean, op.dold_k,
               op.dold_v, op.dold_latent_k, op.dsink_q, op.dsink_k, op.dsink_v, op.dlog_decay,
               op.dold_log_decay);
}

static Register registered_kept("cpu_kept", forward);
static Register registered_kept_backward("cpu_kept_backward", backward);

}  // namespace latte

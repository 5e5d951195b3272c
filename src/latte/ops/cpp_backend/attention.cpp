// Causal Latte-Macchiato: a sliding window and latents in one distribution, forward and backward.
// Latte is the same without a window, p over the latents alone; the window without latents, p = 1.
//
//     y_t = sum_s a_ts v_s,  a_ts = p_t[0] w_ts + sum_l p_t[l] exp(k_s[l] - A_t[l])
//     w_t = softmax of scale <q_t, k_s> over t-W < s <= t,  A_t[l] = log sum_{s<=t} exp(k_s[l])
//
// A task is one head of one sequence, or of a part of one (attention_plan.h). It processes chunks
// of C tokens, which stay in the cache. Up to TOGETHER heads of a sequence take turns, because
// their rows are adjacent in memory. Inside a chunk the weights a_ts of window and latents are one
// matrix, so that both share the products with the values. The tokens before the chunk contribute
// through the latents' state. With a logit r of the past
//
//     e_s = exp(k_s - r),  alpha_t = m + sum_{s<=t} e_s,  U = sum e_s v_s
//     y_t = sum_s a_ts v_s + sum_l p_t[l] / alpha_t[l] U[l]
//     d_t[l] = <dy_t, sum_s e_s v_s + U[l]> / alpha_t[l],  R[l] = sum_t p_t[l] / alpha_t[l] dy_t
//     dk_s[l] = e_s (<R_s, v_s> - sum_{t>=s} p_t d_t / alpha_t)
//     dv_s = sum_t a_ts dy_t + sum_l e_s R
//
// r[l] is the largest logit before a *run* of tokens, or the first logit of the run. A run is part
// of a chunk. It ends before the first key that exceeds any r by REACH. Therefore nothing overflows
// for any logits, and no token's result depends on later tokens, not even by rounding. The state
// (r, m, U) is relative to the largest logit so far. The backward pass uses the saved states at
// every SEGMENT tokens, and computes everything else again.
//
// Latents that forget use k_s - G_s in place of k_s, with G_s = g_1 + ... + g_s from the run's
// start. After the run r becomes r + G, so that no sum is longer than a run. With dA the gradient
// of the log-mass before the run
//
//     dA[l] = <R[l], U[l]> - m sum_t p_t d_t / alpha_t,  dg_t[l] = dA[l] + sum_{s<t} dk_s[l]
//
// Sinks are keys of a sequence that all its queries read, at any distance. They are S more columns
// of the window's logits, after the columns of the chunks. Latents that are late (delay = W) add
// the source t - W at token t. Their runs are the same, over keys and values of other tokens. They
// have separate scores, because they share no column with the window.
//
// With joint, one softmax covers the window's keys and the latents. p is then the softmax over the
// latents' logits and the window's logit plus m_t. m_t is the logsumexp of the logits z_ts of the
// window's keys. The gradients of z_ts are
//
//     dz_ts = p_t[0] w_ts <dy_t, v_s - y_t>,  without joint  p_t[0] w_ts <dy_t, v_s - SWA_t>
//
// FLOPs per token and head with K = D: forward 2 D (2 W + C + 2 L) + L C, backward
// 2 D (5 W + 4 L) + 3 L C, for W = 128, D = 64, L = 32: 51k and 104k, at 75 GFLOP/s of a core 0.7
// and 1.4 us. W + 2 L exponentials of a cycle each add a tenth; 4 (4 D + 2 L) and 4 (7 D + 4 L)
// bytes 0.05 and 0.1 us. Measured 1.2 and 3.3 us: the rest is the rows' softmax, and loads and
// stores of rows that are not adjacent.
//
// Shapes: B batch, T tokens, H heads, G key/value heads, L latents, K key width, D value width,
// W window, P = W - 1 keys of the earlier state, S sinks, N sequences (B, or the packed ones), M
// segments.
#ifndef LATTE_ATTENTION
#define LATTE_ATTENTION

#include "attention_plan.h"
#include "expect.h"
#include "torch_abi.h"

namespace latte {

constexpr double REACH = 16.0;  // exp(k - r) is as exact as its argument
// The reach of keys after which something was forgotten: the past loses weight as fast as they
// gain it.
constexpr double FORGETTING_REACH = 40.0;

// What the parts of split sequences give to each other: P borders, r rows of keys before each of
// them that queries after it read. A part has the border at its beginning, so a first part has
// none.
struct Borders {
    Tensor forgotten;             // (P,H,L), fp64: what a part forgets in all
    Tensor reverse, scalar, top;  // (P,H,L,D), (P,H,L) x 2: R where a part begins, its reference
    Tensor dk, dv;                // (P,r,H,K), (P,r,H,D): of the rows before a part, by the part
    Tensor dsink_k, dsink_v;      // (P,S,H,K), (P,S,H,D): by the part
};

struct Attention {
    Tensor latent_q, latent_k, q, k, v;   // (B,T,H,L+1), (B,T,H,L), (B,T,H,K), (B,T,G,K), (B,T,G,D)
    Tensor mask, bounds, log_mass, mean;  // (B,T), (N+1,) int64, (N,H,L), (N,H,L,D)
    Tensor log_decay;                     // (B,T,H,L), of the sums' dtype
    Tensor tail_k, tail_v, tail_mask;     // (N,P,G,K), (N,P,G,D), (N,P)
    Tensor sink_q, sink_k, sink_v;        // (B,T,H,K), (N,S,G,K), (N,S,G,D)
    Tensor sink_mask, sinks_seen;         // (N,S), (B,T) int64: the first of them, of each query
    Tensor pending_k, pending_v, pending_mask;  // (N,W,H,L), (N,W,G,D), (N,W)
    int64_t window, delay;                      // delay: 0, or the window
    bool causal;                                // the only kind there is
    bool joint;                            // one softmax over the window's keys and the latents
    double scale, softcap;                 // 0: none
    Tensor out, last_mass, last_mean;      // (B,T,H,D), and as log_mass and mean
    Tensor kept_top, kept_mass, kept_sum;  // (M,H,L), (M,H,L), (M,H,L,D)
    Tensor dout, dlast_mass, dlast_mean;
    Tensor dlatent_q, dlatent_k, dq, dk, dv, dlog_mass, dmean, dlog_decay, dtail_k, dtail_v;
    Tensor dsink_q, dsink_k, dsink_v, dpending_k, dpending_v;
    Plan plan;
    Borders borders;  // if the plan is split

    bool near() const { return bool(q); }
    bool far() const { return bool(latent_k); }
    bool forgets() const { return bool(log_decay); }
    int64_t batch() const { return v.sizes[0]; }
    int64_t tokens() const { return v.sizes[1]; }
    int64_t heads() const { return far() ? latent_k.sizes[2] : q.sizes[2]; }
    int64_t groups() const { return v.sizes[2]; }
    int64_t latents() const { return far() ? latent_k.sizes[3] : 0; }
    int64_t key_width() const { return near() ? q.sizes[3] : 0; }
    int64_t tail() const { return tail_k ? tail_k.sizes[1] : 0; }
    int64_t sinks() const { return sink_k ? sink_k.sizes[1] : 0; }
    int64_t sequences() const { return bounds ? bounds.sizes[0] - 1 : batch(); }
    int64_t begin(int64_t n) const { return bounds ? bounds.at<int64_t>()[n] : 0; }
    int64_t length(int64_t n) const {
        return bounds ? bounds.at<int64_t>()[n + 1] - begin(n) : tokens();
    }
    // Segments: the place of the first one of a sequence, and how many places there are.
    int64_t first_segment(int64_t n) const {
        return bounds ? begin(n) / SEGMENT + n : n * ((tokens() + SEGMENT - 1) / SEGMENT);
    }
    int64_t segments() const {
        return bounds ? tokens() / SEGMENT + sequences() : first_segment(batch());
    }
    // Borders of parts: the place of the one at token `from` of a sequence, and how many places
    // there are. Short sequences have none, so packing many of them costs no memory.
    int64_t border_place(int64_t n, int64_t from) const {
        if (bounds) return begin(n) / plan.part + from / plan.part - 1;
        return n * ((tokens() - 1) / plan.part) + from / plan.part - 1;
    }
    int64_t borders_in_all() const {
        return bounds ? tokens() / plan.part : batch() * ((tokens() - 1) / plan.part);
    }
    // Rows of keys before a chunk that its queries read, or that leave the window there.
    int64_t border_rows() const {
        return (window - 1 + (delay > 0) + TOKENS - 1) / TOKENS * TOKENS;
    }
    void make_plan() {
        std::vector<int64_t> lengths(static_cast<size_t>(sequences()));
        for (size_t n = 0; n < lengths.size(); ++n) lengths[n] = length(int64_t(n));
        const int64_t together = tokens() < LONG ? 1 : TOGETHER;
        plan = Plan(lengths, heads(), together, window, thread_count());
    }
};

// One head of one sequence, from token `from` to `stop`.
struct HeadTask {
    int64_t n = 0, h = 0, g = 0, row = 0, begin = 0, count = 0, from = 0, stop = 0;
    int64_t first_kept = 0;  // the place of the sequence's first state
    int64_t border = 0;      // the place of the border before `from`, if that is not 0
    bool last = true;

    HeadTask() = default;
    HeadTask(const Attention& op, const Piece& piece, int64_t head)
        : n(piece.sequence), h(head), g(h / (op.heads() / op.groups())), row(op.bounds ? 0 : n),
          begin(op.begin(n)), count(op.length(n)), from(piece.from), stop(piece.stop),
          first_kept(op.first_segment(n)), border(op.border_place(n, from)), last(piece.last) {}
};

}  // namespace latte

#define LATTE_FILE "attention.cpp"
#define LATTE_FOR_PAIRS
#include "each_isa.h"

namespace latte {

// What an op has: latents, and a window.
struct Parts {
    bool far, near;
};

static Attention inputs(Stack& stack, Parts parts) {
    Attention op;
    if (parts.far) op.latent_q = stack.tensor(), op.latent_k = stack.tensor();
    if (parts.near) op.q = stack.tensor(), op.k = stack.tensor();
    op.v = stack.tensor(), op.mask = stack.maybe_tensor(), op.bounds = stack.maybe_tensor();
    if (parts.far) {
        op.log_mass = stack.maybe_tensor(), op.mean = stack.maybe_tensor();
        op.log_decay = stack.maybe_tensor();
    }
    if (!parts.near) return op;
    op.tail_k = stack.maybe_tensor(), op.tail_v = stack.maybe_tensor();
    op.tail_mask = stack.maybe_tensor();
    op.sink_q = stack.maybe_tensor(), op.sink_k = stack.maybe_tensor();
    op.sink_v = stack.maybe_tensor(), op.sink_mask = stack.maybe_tensor();
    op.sinks_seen = stack.maybe_tensor();
    if (!parts.far) return op;
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

static const char* name_of(Parts parts, bool back) {
    if (parts.far && parts.near) return back ? "cpu_macchiato_backward" : "cpu_macchiato";
    if (parts.far) return back ? "cpu_latte_backward" : "cpu_latte";
    return back ? "cpu_window_backward" : "cpu_window";
}

// (inputs, window, scale, softcap, then delay and joint, or without latents causal) -> y and, if
// there are latents, log_mass, mean, kept x 3
template <bool far, bool near>
static void forward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Attention op = inputs(stack, {far, near});
    numbers(stack, op);
    check_inputs(Expect(name_of({far, near}, false)), op);
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

// Of the backward pass.
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
    Attention op = inputs(stack, {far, near});
    op.dout = static_cast<Tensor&&>(dout), op.dlast_mass = static_cast<Tensor&&>(dlast_mass);
    op.dlast_mean = static_cast<Tensor&&>(dlast_mean);
    if (far)
        op.kept_top = stack.tensor(), op.kept_mass = stack.tensor(), op.kept_sum = stack.tensor();
    numbers(stack, op);
    const Expect expect(name_of({far, near}, true));
    check_inputs(expect, op), check_gradients(expect, op);
    const int64_t B = op.batch(), T = op.tokens(), H = op.heads(), G = op.groups();
    const int64_t L = op.latents(), K = op.key_width(), D = op.v.sizes[3], N = op.sequences();
    const int32_t dtype = op.v.dtype, sums = wide(op.v);
    op.make_plan();
    // Heads that share keys and values each compute separate gradients, and so do parts of a
    // sequence at their borders. The sums have a fixed order.
    const int32_t each = H == G && !op.plan.split ? dtype : sums;
    const bool carried = bool(op.log_mass), tailed = bool(op.tail_k);
    op.dv = Tensor::empty({B, T, H, D}, each);
    if (far) {
        op.dlatent_q = Tensor::empty({B, T, H, L + near}, dtype);
        op.dlatent_k = Tensor::empty({B, T, H, L}, dtype);
        op.dlog_mass = carried ? Tensor::empty({N, H, L}, sums) : Tensor::empty({0}, sums);
        op.dmean = carried ? Tensor::empty({N, H, L, D}, sums) : Tensor::empty({0}, sums);
        op.dlog_decay = op.forgets() ? Tensor::empty({B, T, H, L}, sums) : Tensor::empty({0}, sums);
    }
    if (near) {
        op.dq = Tensor::empty({B, T, H, K}, dtype), op.dk = Tensor::empty({B, T, H, K}, each);
        op.dtail_k = tailed ? Tensor::empty({N, op.tail(), H, K}, each) : Tensor::empty({0}, dtype);
        op.dtail_v = tailed ? Tensor::empty({N, op.tail(), H, D}, each) : Tensor::empty({0}, dtype);
        const int64_t S = op.sinks();
        const bool sinks = bool(op.sink_k), pending = bool(op.pending_k);
        op.dsink_q = sinks ? Tensor::empty({B, T, H, K}, dtype) : Tensor::empty({0}, dtype);
        op.dsink_k = sinks ? Tensor::empty({N, S, H, K}, each) : Tensor::empty({0}, dtype);
        op.dsink_v = sinks ? Tensor::empty({N, S, H, D}, each) : Tensor::empty({0}, dtype);
        const int64_t P = op.window;
        op.dpending_k = pending ? Tensor::empty({N, P, H, L}, dtype) : Tensor::empty({0}, dtype);
        op.dpending_v = pending ? Tensor::empty({N, P, H, D}, each) : Tensor::empty({0}, dtype);
        // No latent has received the sources that are still pending: their gradients are 0.
        for (Tensor* x : {&op.dpending_k, &op.dpending_v}) x->clear();
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

#else  // once per instruction set

#include "rows.h"
#include "attention_factors.h"
#include "attention_tiles.h"
#include "attention_head.h"
#include "attention_window.h"
#include "attention_latents.h"
#include "attention_parts.h"

// The state before the first token of a sequence. Of a later part it is empty.
template <class T>
inline void Head<T>::begin_task(const HeadTask& given) {
    task = given;
    low = op.tail_k ? -op.tail() : 0;
    if (late) find_heard();
    for (int64_t l = 0; l < Lp; ++l) state.top[l] = lowest, state.mass[l] = 0;
    std::memset(state.sum, 0, size_t(Lp * Dp) * sizeof(T));
    if (!op.log_mass || task.from) return;  // also if there are no latents
    const int64_t at = (task.n * op.heads() + task.h) * L;
    for (int64_t l = 0; l < L; ++l) {
        state.top[l] = op.log_mass.at<T>()[at + l];
        if (state.top[l] == lowest) continue;
        // Without a finite log-mass there is no mean: its queries and the next state are NaN.
        const bool finite = state.top[l] < std::numeric_limits<T>::infinity();
        state.mass[l] = finite ? T(1) : std::numeric_limits<T>::quiet_NaN();
        std::memcpy(state.sum + l * Dp, op.mean.at<T>() + (at + l) * D, size_t(D) * sizeof(T));
    }
}

template <class T>
inline void Head<T>::begin_forward(const HeadTask& given) {
    begin_task(given);
    if (S) load_sinks();
    if (far && task.from) take_kept(task.from / SEGMENT);
    for (int64_t c = first_chunk() + 1 - slots; c < first_chunk() && chunks(); ++c)
        if ((c + 1) * TOKENS > low) load_keys(c);
}

template <class T>
inline void Head<T>::forward_chunk(int64_t c) {
    const int64_t rows = rows_of(c);
    if (far && c * TOKENS % SEGMENT == 0) put_kept(c * TOKENS / SEGMENT);
    load_keys(c);
    probabilities(c, rows);
    if (far) load_logits(c, rows);
    if (!shared) with_keys(c, 0, rows, weights, true, false, out);
    bool strange = false;
    if (late) {
        load_values(c, rows, late_v);
        strange = not_finite(late_v, rows * Dp);
        std::memset(scores, 0, size_t(rows * TOKENS) * sizeof(T));
    }
    for (int64_t begin = 0; far && begin < rows;) {
        const LatentRun<T> run = next_run(begin, rows);
        scale_keys(run);
        if (shared) {
            add_scores(run, weights + base, ld);
            with_keys(c, begin, run.end, weights, true, true, out);
        } else {
            add_scores(run, scores, TOKENS);
            with_late(run, strange);
        }
        product(out + begin * Dp, Dp, true, run.end - begin, Dp, ratio + begin * Lp, Lp, int64_t(1),
                state.sum, Dp, L);
        take_in(run, late ? late_v : own_values(c));
        begin = run.end;
    }
    if (S) with_sinks(c, rows, weights, out);
    put(op.out, task.row, task.begin + c * TOKENS, task.h, rows, out, Dp);
}

template <class T>
inline void Head<T>::end_forward() {
    if (!task.last) return;
    const int64_t at = (task.n * op.heads() + task.h) * L;
    for (int64_t l = 0; l < L; ++l) {
        const T mass = state.mass[l];
        op.last_mass.at<T>()[at + l] = mass == T(0) ? lowest : state.top[l] + std::log(mass);
        for (int64_t d = 0; d < D; ++d)
            op.last_mean.at<T>()[(at + l) * D + d] =
                mass == T(0) ? T(0) : state.sum[l * Dp + d] / mass;
    }
}

template <class T>
inline void Head<T>::begin_backward(const HeadTask& given) {
    begin_task(given);
    if (S) load_sinks();
    begin_end();
    if (far && !task.last) take_reverse();
    if (late && task.last)  // no latent has received the last tokens
        for (int64_t i = most(0, task.count - delay); i < task.count; ++i)
            std::memset(
                op.dlatent_k.data + place(op.dlatent_k, task.row, task.begin + i, task.h) * size, 0,
                size_t(L * size));
    load_last_keys();
}
// The keys before the last chunk, and those that its queries read besides.
template <class T>
inline void Head<T>::load_last_keys() {
    for (int64_t c = chunks() - slots + 1; c < chunks() && chunks(); ++c)
        if ((c + 1) * TOKENS > low) load_keys(c);
}
template <class T>
inline void Head<T>::load_oldest_keys(int64_t c) {
    const int64_t oldest = c - slots + 1;
    if ((oldest + 1) * TOKENS > low) load_keys(oldest);
}

template <class T>
inline void Head<T>::backward_chunk(int64_t c) {
    load_oldest_keys(c);
    pull(c);
    Keys<T>& s = slot(c);
    const int64_t token = task.begin + c * TOKENS, rows = rows_of(c);
    if (near) put(op.dk, task.row, token, task.h, rows, s.dk, Kp);
    put(op.dv, task.row, token, task.h, rows, s.dv, Dp);
    if (far && c > first_chunk() && c * TOKENS % SEGMENT == 0)
        walk_segment(c * TOKENS / SEGMENT - 1);
}

template <class T>
inline void Head<T>::end_backward() {
    if (op.plan.split) put_border();
    if (task.from) return;
    if (S) {
        put(op.dsink_k, task.n, 0, task.h, S, sinks.dk, Kp);
        put(op.dsink_v, task.n, 0, task.h, S, sinks.dv, Dp);
    }
    if (op.tail_k) end_tail();
    if (op.log_mass) end_state();
}

template <class T>
inline void Head<T>::pull(int64_t c) {
    const int64_t rows = rows_of(c), token = task.begin + c * TOKENS;
    probabilities(c, rows);
    take(op.dout, task.row, token, task.h, rows, dy, Dp);
    against(c, rows, dy, Dp, D, true, shared, pairs);
    if (S) against_sinks(rows, dy, Dp, D, sinks.v_panels, pairs);
    for (int64_t i = 0; i < rows; ++i) through_window(c, i);
    if (!shared) to_keys(c, rows, weights, dy, true, false);
    if (far) backward_latents(c, rows);
    for (int64_t i = 0; op.joint && i < rows; ++i) through_softmax(c, i, totals[i]);
    if (S) backward_sinks(c, rows);
    if (!near) return;
    to_keys(c, rows, logits, queries, false, false);
    with_keys(c, 0, rows, logits, false, false, queries);
    for (int64_t i = 0; i < rows * Kp; ++i) queries[i] *= query_scale;
    put(op.dq, task.row, token, task.h, rows, queries, Kp);
}

// One walk over pieces: what each of their heads does at its first chunk, at every chunk, and after
// the last one.
template <class T>
struct Stage {
    void (Head<T>::*begin)(const HeadTask&);
    void (Head<T>::*chunk)(int64_t);
    void (Head<T>::*end)();
};

template <class T>
static void walk(const Attention& op, bool back, const std::vector<Piece>& pieces,
                 const Stage<T>& stage) {
    int64_t together = 0;
    for (const Piece& piece : pieces) together = most(together, piece.heads);
    parallel_tasks(int64_t(pieces.size()), [&](Tasks& tasks) {
        Memory shared;
        std::vector<Head<T>> heads;
        heads.reserve(size_t(together));
        for (int64_t i = 0; i < together; ++i) heads.emplace_back(op, back, shared);
        for (int64_t task = tasks.next(); task >= 0; task = tasks.next()) {
            const Piece& piece = pieces[size_t(task)];
            for (int64_t i = 0; i < piece.heads; ++i) {
                Head<T>& head = heads[size_t(i)];
                (head.*stage.begin)(HeadTask(op, piece, piece.head + i));
                const bool last = i == piece.heads - 1;
                head.ahead_head = last ? piece.head : head.task.h + 1;
                head.ahead_chunks = !last ? 0 : back ? -1 : 1;
            }
            const int64_t first = heads[0].first_chunk(), stop = heads[0].chunks();
            for (int64_t c = first; c < stop; ++c)
                for (int64_t i = 0; i < piece.heads; ++i)
                    (heads[size_t(i)].*stage.chunk)(back ? stop - 1 - (c - first) : c);
            for (int64_t i = 0; i < piece.heads; ++i) (heads[size_t(i)].*stage.end)();
        }
    });
}

template <class T>
static void run_forward_in(const Attention& op) {
    const std::vector<Piece>& pieces = op.plan.pieces;
    if (op.plan.split && op.far()) {
        const Stage<T> local = {&Head<T>::begin_local, &Head<T>::local_chunk, &Head<T>::end_local};
        walk(op, false, chosen(pieces, [](const Piece& piece) { return !piece.last; }), local);
        join_states<T>(op);
    }
    walk<T>(op, false, pieces,
            {&Head<T>::begin_forward, &Head<T>::forward_chunk, &Head<T>::end_forward});
}

template <class T>
static void run_backward_in(const Attention& op) {
    const std::vector<Piece>& pieces = op.plan.pieces;
    if (op.plan.split && op.far()) {
        const Stage<T> local = {&Head<T>::begin_local_reverse, &Head<T>::local_reverse_chunk,
                                &Head<T>::end_local_reverse};
        walk(op, true, chosen(pieces, [](const Piece& piece) { return piece.from > 0; }), local);
        join_reverse<T>(op);
    }
    walk<T>(op, true, pieces,
            {&Head<T>::begin_backward, &Head<T>::backward_chunk, &Head<T>::end_backward});
    if (op.plan.split) add_borders<T>(op);
}

#if LATTE_PAIRS
// Only bf16 gains by pairs.
static void run_forward(const Attention& op) {
    if (op.v.type() == Type::BF16) run_forward_in<float>(op);
    else avx512::run_forward(op);
}
static void run_backward(const Attention& op) {
    if (op.v.type() == Type::BF16) run_backward_in<float>(op);
    else avx512::run_backward(op);
}
using avx512::add_heads;
#else
static void run_forward(const Attention& op) {
    if (op.v.type() == Type::F64) return run_forward_in<double>(op);
    run_forward_in<float>(op);
}

static void run_backward(const Attention& op) {
    if (op.v.type() == Type::F64) return run_backward_in<double>(op);
    run_backward_in<float>(op);
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

#endif

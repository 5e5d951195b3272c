// Causal Latte-Macchiato: a sliding window and latents in one distribution, forward and backward.
// Latte is the same without a window, p over the latents alone; the window without latents, p = 1.
//
//     y_t = sum_s a_ts v_s,  a_ts = p_t[0] w_ts + sum_l p_t[l] exp(k_s[l] - A_t[l])
//     w_t = softmax of scale <q_t, k_s> over t-W < s <= t,  A_t[l] = log sum_{s<=t} exp(k_s[l])
//
// A task is one head of one sequence, walked in chunks of C tokens that stay in the cache, up to
// TOGETHER heads of a sequence in turns: their rows lie side by side in memory. Inside a chunk the
// weights a_ts of window and latents are one matrix, so that the products with the values are
// shared; what lies before it comes from the latents' state. With a logit r of the past
//
//     e_s = exp(k_s - r),  alpha_t = m + sum_{s<=t} e_s,  U = sum e_s v_s
//     y_t = sum_s a_ts v_s + sum_l p_t[l] / alpha_t[l] U[l]
//     d_t[l] = <dy_t, sum_s e_s v_s + U[l]> / alpha_t[l],  R[l] = sum_t p_t[l] / alpha_t[l] dy_t
//     dk_s[l] = e_s (<R_s, v_s> - sum_{t>=s} p_t d_t / alpha_t)
//     dv_s = sum_t a_ts dy_t + sum_l e_s R
//
// r[l] is the largest logit before a *run* of tokens or the first of it; the run, within a chunk,
// ends before the first key that exceeds any r by REACH, so that nothing overflows whatever the
// logits are, and nothing that a token is given depends on later ones, not even by rounding. The
// state (r, m, U) is relative to the largest logit seen. Kept for the backward pass are the states
// at every SEGMENT tokens; all else is computed anew.
//
// Latents that forget have k_s - G_s for k_s, G_s = g_1 + ... + g_s from the run's start; after it
// r becomes r + G, so that no sum is longer than a run. With dA the gradient of the log-mass before
// the run
//
//     dA[l] = <R[l], U[l]> - m sum_t p_t d_t / alpha_t,  dg_t[l] = dA[l] + sum_{s<t} dk_s[l]
//
// Sinks, keys of a sequence that its queries see wherever they are, are S more columns of the
// window's logits, behind those of the chunks. Latents that are late (delay = W) take in, at token t,
// the source t - W: the same runs, over keys and values of other tokens, with scores of their own
// since they share no column with the window.
//
// One softmax over the window's keys and the latents (joint): p is then the softmax over the latents'
// logits and that of the window plus the logsumexp m_t of its keys' logits z_ts. Of these
//
//     dz_ts = p_t[0] w_ts <dy_t, v_s - y_t>,  and otherwise  p_t[0] w_ts <dy_t, v_s - SWA_t>
//
// FLOPs per token and head with K = D: forward 2 D (2 W + C + 2 L) + L C, backward
// 2 D (5 W + 4 L) + 3 L C, for W = 128, D = 64, L = 32: 51k and 104k, at 75 GFLOP/s of a core 0.7
// and 1.4 us. W + 2 L exponentials of a cycle each add a tenth; 4 (4 D + 2 L) and 4 (7 D + 4 L)
// bytes 0.05 and 0.1 us. Measured 1.2 and 3.3 us: beside the tiles are the rows' softmax, and loads
// and stores of rows that lie apart.
//
// Shapes: B batch, T tokens, H heads, G key/value heads, L latents, K key width, D value width,
// W window, P = W - 1 keys of the earlier state, S sinks, N sequences (B, or the packed ones), M
// segments.
#ifndef LATTE_ATTENTION
#define LATTE_ATTENTION

#include "expect.h"
#include "torch_abi.h"

namespace latte {

constexpr int64_t TOKENS = 64;    // C: of a chunk, a multiple of every vector's width
constexpr int64_t SEGMENT = 256;  // tokens between two states that are kept, in whole chunks
constexpr int64_t TOGETHER = 4;   // heads of a sequence that walk through it together
constexpr int64_t LONG = 1024;    // tokens from which that costs less than its memory
constexpr double REACH = 16.0;    // exp(k - r) is as exact as its argument
// Of keys since which something was forgotten: the past loses weight as fast as they gain it.
constexpr double FORGETTING_REACH = 40.0;

struct Attention {
    Tensor latent_q, latent_k, q, k, v;  // (B,T,H,L+1), (B,T,H,L), (B,T,H,K), (B,T,G,K), (B,T,G,D)
    Tensor mask, bounds, log_mass, mean; // (B,T), (N+1,) int64, (N,H,L), (N,H,L,D)
    Tensor log_decay;                    // (B,T,H,L), of the sums' dtype
    Tensor tail_k, tail_v, tail_mask;    // (N,P,G,K), (N,P,G,D), (N,P)
    Tensor sink_q, sink_k, sink_v;       // (B,T,H,K), (N,S,G,K), (N,S,G,D)
    Tensor sink_mask, sinks_seen;        // (N,S), (B,T) int64: the first of them, of each query
    Tensor pending_k, pending_v, pending_mask;       // (N,W,H,L), (N,W,G,D), (N,W)
    int64_t window, delay;               // delay: 0, or the window
    bool joint;                          // one softmax over the window's keys and the latents
    double scale, softcap;               // 0: none
    Tensor out, last_mass, last_mean;    // (B,T,H,D), and as log_mass and mean
    Tensor kept_top, kept_mass, kept_sum;            // (M,H,L), (M,H,L), (M,H,L,D)
    Tensor dout, dlast_mass, dlast_mean;
    Tensor dlatent_q, dlatent_k, dq, dk, dv, dlog_mass, dmean, dlog_decay, dtail_k, dtail_v;
    Tensor dsink_q, dsink_k, dsink_v, dpending_k, dpending_v;

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
    int64_t segments() const {
        if (bounds) return tokens() / SEGMENT + sequences();
        return batch() * ((tokens() + SEGMENT - 1) / SEGMENT);
    }
};

// One head of one sequence.
struct HeadTask {
    int64_t n, h, g, row, begin, count, first_kept;

    HeadTask(const Attention& op, int64_t task)
        : n(task / op.heads()), h(task % op.heads()), g(h / (op.heads() / op.groups())), row(n),
          begin(0), count(op.tokens()) {
        first_kept = n * ((count + SEGMENT - 1) / SEGMENT);
        if (!op.bounds) return;
        const int64_t* bounds = op.bounds.at<int64_t>();
        row = 0, begin = bounds[n], count = bounds[n + 1] - begin;
        first_kept = begin / SEGMENT + n;
    }
};

}  // namespace latte

#define LATTE_FILE "attention.cpp"
#include "each_isa.h"

namespace latte {

// What an op has: latents, and a window.
struct Parts { bool far, near; };

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
    expect(op.k, "k", dtype, {B, T, G, K});
    expect.together({&op.tail_k, &op.tail_v, &op.tail_mask}, "tail_k, tail_v and tail_mask");
    expect(op.tail_k, "tail_k", dtype, {N, W - 1, G, K});
    expect(op.tail_v, "tail_v", dtype, {N, W - 1, G, D});
    expect(op.tail_mask, "tail_mask", boolean, {N, W - 1}, plain);
    expect.together({&op.sink_q, &op.sink_k, &op.sink_v, &op.sink_mask, &op.sinks_seen},
                    "sink_q, sink_k, sink_v, sink_mask and sinks_seen");
    expect(op.sink_q, "sink_q", dtype, {B, T, H, K});
    expect(op.sink_k, "sink_k", dtype, {N, S, G, K}), expect(op.sink_v, "sink_v", dtype, {N, S, G, D});
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

// (inputs, window, scale, softcap, delay, joint) -> y and, if there are latents, log_mass, mean, kept x 3
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
    if (!far) {
        LATTE_CHOOSE(run_forward)(op);
        return stack.give(op.out);
    }
    op.last_mass = Tensor::empty({N, H, L}, dtype);
    op.last_mean = Tensor::empty({N, H, L, D}, dtype);
    op.kept_top = Tensor::empty({M, H, L}, dtype), op.kept_mass = Tensor::empty({M, H, L}, dtype);
    op.kept_sum = Tensor::empty({M, H, L, D}, dtype);
    // Packed sequences may need fewer segments than there are: what they keep is defined there too.
    if (op.bounds)
        for (Tensor* x : {&op.kept_top, &op.kept_mass, &op.kept_sum})
            x->clear();
    LATTE_CHOOSE(run_forward)(op);
    stack.give(op.out, op.last_mass, op.last_mean, op.kept_top, op.kept_mass, op.kept_sum);
}

// (dy and the state's gradients, the inputs, kept x 3, numbers) -> gradients of latent_q, latent_k,
// q, k, v, log_mass, mean, log_decay, the tail's keys and values, the sinks' queries, keys and values
// and the pending sources' keys and values, as far as the op has them, empty for None
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
    // Heads that share keys and values give each their own gradients, added up in one order.
    const int32_t each = H == G ? dtype : sums;
    const bool carried = bool(op.log_mass), tailed = bool(op.tail_k);
    op.dv = Tensor::empty({B, T, H, D}, each);
    if (far) {
        op.dlatent_q = Tensor::empty({B, T, H, L + near}, dtype);
        op.dlatent_k = Tensor::empty({B, T, H, L}, dtype);
        op.dlog_mass = carried ? Tensor::empty({N, H, L}, sums) : Tensor::empty({0}, sums);
        op.dmean = carried ? Tensor::empty({N, H, L, D}, sums) : Tensor::empty({0}, sums);
        op.dlog_decay =
            op.forgets() ? Tensor::empty({B, T, H, L}, sums) : Tensor::empty({0}, sums);
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
        // Of those that stay pending no latent has heard.
        for (Tensor* x : {&op.dpending_k, &op.dpending_v}) x->clear();
    }
    LATTE_CHOOSE(run_backward)(op);
    if (H != G) {
        for (Tensor* x : {&op.dk, &op.dv, &op.dtail_k, &op.dtail_v, &op.dsink_k, &op.dsink_v,
                          &op.dpending_v}) {
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
        stack.give(op.dq, op.dk, op.dv, op.dtail_k, op.dtail_v, op.dsink_q, op.dsink_k,
                   op.dsink_v);
}

static Register registered_macchiato("cpu_macchiato", forward<true, true>);
static Register registered_macchiato_backward("cpu_macchiato_backward", backward<true, true>);
static Register registered_latte("cpu_latte", forward<true, false>);
static Register registered_latte_backward("cpu_latte_backward", backward<true, false>);
static Register registered_window("cpu_window", forward<false, true>);
static Register registered_window_backward("cpu_window_backward", backward<false, true>);

}  // namespace latte

#else  // once per instruction set

constexpr int64_t ROWS = 6;  // of a tile: 12 vectors of sums, 2 of b and one of a fill 16 registers

// c (M rows of one V) = a b, or added to it: k products per element in one order, whatever M is.
template <class T, int M>
static void tile_rows(T* c, int64_t ldc, bool add, const T* a, int64_t row, int64_t step,
                      const T* b, int64_t ldb, int64_t k) {
    using Numbers = typename Raw<T>::numbers;
    Numbers low[M], high[M];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
        V<T> before = add ? load_all(c + m * ldc) : V<T>{};
        low[m] = before.low, high[m] = before.high;
    }
    for (; k > 0; --k, a += step, b += ldb) {
        Numbers left, right;
        std::memcpy(&left, b, sizeof left);
        std::memcpy(&right, b + half_width<T>, sizeof right);
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) {
            const T x = a[m * row];
            low[m] += left * x, high[m] += right * x;
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) store_all(c + m * ldc, V<T>{low[m], high[m]});
}

template <class T>
static void tile(int64_t rows, T* c, int64_t ldc, bool add, const T* a, int64_t row, int64_t step,
                 const T* b, int64_t ldb, int64_t k) {
    switch (rows) {
        case 1: return tile_rows<T, 1>(c, ldc, add, a, row, step, b, ldb, k);
        case 2: return tile_rows<T, 2>(c, ldc, add, a, row, step, b, ldb, k);
        case 3: return tile_rows<T, 3>(c, ldc, add, a, row, step, b, ldb, k);
        case 4: return tile_rows<T, 4>(c, ldc, add, a, row, step, b, ldb, k);
        case 5: return tile_rows<T, 5>(c, ldc, add, a, row, step, b, ldb, k);
        default: return tile_rows<T, 6>(c, ldc, add, a, row, step, b, ldb, k);
    }
}

LATTE_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
LATTE_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
template <class T> LATTE_INLINE int64_t whole(int64_t n) {
    return (n + width<T> - 1) / width<T> * width<T>;
}

// c (rows of half a V) = a b, of few columns: a whole one's other half would be wasted.
template <class T, int M>
static void half_tile_rows(T* c, int64_t ldc, const T* a, int64_t lda, const T* b, int64_t ldb,
                           int64_t k) {
    typename Raw<T>::numbers sums[M] = {}, right;
    for (; k > 0; --k, ++a, b += ldb) {
        std::memcpy(&right, b, sizeof right);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) sums[m] += right * a[m * lda];
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) std::memcpy(c + m * ldc, &sums[m], sizeof right);
}
template <class T>
static void half_product(T* c, int64_t ldc, int64_t rows, const T* a, int64_t lda, const T* b,
                         int64_t ldb, int64_t k) {
    int64_t i = 0;
    for (; i + 8 <= rows; i += 8) half_tile_rows<T, 8>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k);
    for (; i < rows; ++i) half_tile_rows<T, 1>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k);
}

// c (rows, columns of whole V's) = a b, or added to it.
template <class T>
static void product(T* c, int64_t ldc, bool add, int64_t rows, int64_t columns, const T* a,
                    int64_t row, int64_t step, const T* b, int64_t ldb, int64_t k) {
    for (int64_t d = 0; d < columns; d += width<T>)
        for (int64_t i = 0; i < rows; i += ROWS)
            tile(least(ROWS, rows - i), c + i * ldc + d, ldc, add, a + i * row, row, step, b + d,
                 ldb, k);
}

// Rows first ... stop of x (., n), turned into panels: of every width<T> rows (n, width<T>).
template <class T>
static void turn(const T* x, int64_t ld, int64_t first, int64_t stop, int64_t n, T* panels) {
    constexpr int64_t W = width<T>;
    for (int64_t i = first; i < stop; ++i) {
        T* to = panels + i / W * n * W + i % W;
        for (int64_t d = 0; d < n; ++d) to[d * W] = x[i * ld + d];
    }
}

// (n, m) -> (m, n), both with rows of whole vectors.
template <class T>
static void transpose(const T* x, int64_t ldx, int64_t n, int64_t m, T* to, int64_t ld) {
    for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < m; ++j) to[j * ld + i] = x[i * ldx + j];
}

// Lane numbers 0, 1, ...
template <class T> LATTE_INLINE V<T> lanes() {
    T numbers[width<T>];
    for (int64_t j = 0; j < width<T>; ++j) numbers[j] = T(j);
    return load_all(numbers);
}
// x where first <= place < stop, else y: places are those of the lanes, from `at` on.
template <class T>
LATTE_INLINE V<T> within(V<T> x, V<T> y, int64_t at, int64_t first, int64_t stop) {
    if (__builtin_expect(at >= first && at + width<T> <= stop, 1)) return x;
    V<T> lane = lanes<T>();
    x = select(lane < T(first - at), y, x);
    return select(lane < T(stop - at), x, y);
}
template <class T> LATTE_INLINE bool any(Mask<T> x) {
    const auto both = x.low | x.high;
    uint64_t bits[sizeof both / 8], found = 0;
    std::memcpy(bits, &both, sizeof both);
    for (uint64_t some : bits) found |= some;
    return found;
}
template <class T> LATTE_INLINE T largest(V<T> x) {
    T numbers[width<T>], top;
    store_all(numbers, x);
    top = numbers[0];
    for (T number : numbers) top = number > top ? number : top;
    return top;
}

// Columns first ... stop of a row.
struct Span { int64_t first, stop; };

// Calls work(c, span) for every vector of the two spans; the second begins at a whole vector.
template <class T, class Work>
LATTE_INLINE void vectors(Span one, Span two, const Work& work) {
    for (int64_t c = one.first / width<T> * width<T>; c < one.stop; c += width<T>) work(c, one);
    for (int64_t c = two.first; c < two.stop; c += width<T>) work(c, two);
}

// The logits of two spans become exp(x - top), with their sum: all 0 if every one is -inf.
template <class T> struct Exponentials { T top, sum; };
template <class T>
static Exponentials<T> exponentiate(T* x, Span one, Span two) {
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    V<T> tops = all(lowest), sums{};
    vectors<T>(one, two, [&](int64_t c, Span s) {
        tops = larger(tops, within(load_all(x + c), all(lowest), c, s.first, s.stop));
    });
    T top = largest(tops);
    if (top == lowest) top = 0;
    vectors<T>(one, two, [&](int64_t c, Span s) {
        V<T> e = within(decay(load_all(x + c) - top).kept, V<T>{}, c, s.first, s.stop);
        sums = sums + e;
        store_all(x + c, e);
    });
    return {top, sum(sums)};
}
// Makes them sum to `factor`.
template <class T>
static void normalise(T* x, Span one, Span two, T total, T factor) {
    const T share = total == T(0) ? T(0) : factor / total;
    vectors<T>(one, two, [&](int64_t c, Span s) {
        store_all(x + c, within(load_all(x + c) * share, V<T>{}, c, s.first, s.stop));
    });
}
template <class T>
static void soften(T* x, Span one, Span two, T factor) {
    normalise(x, one, two, exponentiate(x, one, two).sum, factor);
}

// Whether one of these numbers, in whole vectors, is not finite.
template <class T>
static bool not_finite(const T* x, int64_t count) {
    V<T> nothing{};
    for (int64_t c = 0; c < count; c += width<T>) nothing = nothing + load_all(x + c) * T(0);
    return sum(nothing) != T(0);
}

// Where a token's row of one head begins, in elements.
LATTE_INLINE int64_t place(const Tensor& x, int64_t row, int64_t token, int64_t head) {
    return row * x.strides[0] + token * x.strides[1] + head * x.strides[2];
}

// Tokens of one head as rows of T, zeros up to ld.
template <class T, class S>
static void take_as(const Tensor& x, int64_t row, int64_t token, int64_t head, int64_t count, T* to,
                    int64_t ld, T factor) {
    const int64_t n = x.sizes[3], stride = x.strides[3];
    for (int64_t i = 0; i < count; ++i, to += ld) {
        const S* from = x.at<S>() + place(x, row, token + i, head);
        for (int64_t c = 0; c < ld; c += width<T>)
            store_all(to + c, c < n ? load(from + c * stride, stride, n - c) * factor : V<T>{});
    }
}
template <class T>
static void take(const Tensor& x, int64_t row, int64_t token, int64_t head, int64_t count, T* to,
                 int64_t ld, T factor = T(1)) {
    if constexpr (sizeof(T) == 8) {
        take_as<T, double>(x, row, token, head, count, to, ld, factor);
    } else {
        switch (x.type()) {
            case Type::BF16: return take_as<T, bf16>(x, row, token, head, count, to, ld, factor);
            case Type::F16: return take_as<T, fp16>(x, row, token, head, count, to, ld, factor);
            default: return take_as<T, float>(x, row, token, head, count, to, ld, factor);
        }
    }
}

// The inverse; x is contiguous.
template <class T, class S>
static void put_as(const Tensor& x, int64_t row, int64_t token, int64_t head, int64_t count,
                   const T* from, int64_t ld) {
    const int64_t n = x.sizes[3];
    for (int64_t i = 0; i < count; ++i, from += ld) {
        S* to = x.at<S>() + place(x, row, token + i, head);
        for (int64_t c = 0; c < n; c += width<T>) store(to + c, load_all(from + c), n - c);
    }
}
template <class T>
static void put(const Tensor& x, int64_t row, int64_t token, int64_t head, int64_t count,
                const T* from, int64_t ld) {
    if constexpr (sizeof(T) == 8) {
        put_as<T, double>(x, row, token, head, count, from, ld);
    } else {
        switch (x.type()) {
            case Type::BF16: return put_as<T, bf16>(x, row, token, head, count, from, ld);
            case Type::F16: return put_as<T, fp16>(x, row, token, head, count, from, ld);
            default: return put_as<T, float>(x, row, token, head, count, from, ld);
        }
    }
}

// A chunk of keys and values, ready to be read by queries.
template <class T>
struct Keys {
    T *k, *k_panels, *v, *v_panels, *dk, *dv;
    T* hidden;     // 0, or -inf for a key that is masked
    bool masked;   // one of them is
    bool strange;  // a value is not finite: no query may multiply it by 0
};

// The sinks of a sequence, in rows of whole vectors.
template <class T>
struct SinkKeys {
    T *k, *k_panels, *v, *v_panels, *dk, *dv;
    bool strange;
};

// The latents before a token, relative to `top`.
template <class T>
struct Latents { T *top, *mass, *sum; };

// Tokens of a chunk with one reference for every latent, the state before them, and what they
// forget of it in all.
template <class T>
struct LatentRun { int64_t begin, end; Latents<T> before; const T* forgotten; };

// Room for arrays of which first the sizes are told, then the places.
struct Memory {
    std::vector<char> bytes;
    size_t used = 0;

    template <class T>
    T* room(int64_t count) {
        const size_t at = (reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64 + used;
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64 + 64;  // not a power of two apart
        return reinterpret_cast<T*>(at);
    }
    void reserve() {
        if (bytes.size() < used + 64) bytes.assign(used + 64, 0);
    }
};

// What is kept of a head from chunk to chunk, and what all use for the chunk at hand.
template <class T>
struct Head {
    static constexpr int64_t W = width<T>;
    static constexpr T lowest = -std::numeric_limits<T>::infinity();
    const Attention& op;
    const int64_t K, D, L, Kp, Dp, Lp, Lq;  // widths, of whole vectors
    const int64_t size;  // bytes of an element of the inputs
    int64_t reach, slots, columns, base, low;  // keys before a query; chunks of keys it may read
    const int64_t S, Sp;
    int64_t ld;  // of a row's columns: those of the chunks, then of the sinks
    const bool near, far, back, forgets;
    const int64_t delay;           // tokens by which latents are late
    const bool late, shared;       // latents; that share the columns of a chunk's own keys
    int64_t heard = 0;             // the first token of which late latents have seen anything
    const int64_t column;  // of p at which latent_q begins: the window's is W - 1, latents follow
    Memory own_memory;
    std::vector<Keys<T>> ring;
    T *queries, *dy, *logits, *weights, *pairs, *slope, *p, *keys, *decays, *forgotten, *e,
        *e_panels, *alpha, *ratio, *out, *before, *delta, *lost, *pulled, *dkeys, *turned, *tops,
        *own, *totals, *reverse, *scalar, *sink_queries, *scores, *late_v, *late_panels, *late_pairs, *late_dv;
    SinkKeys<T> sinks;
    Latents<T> state;
    std::vector<T> top;              // what R is relative to
    std::vector<T> saved;            // states before the runs of a segment
    std::vector<LatentRun<T>> runs;  // of a segment, or of a chunk
    HeadTask task;
    int64_t ahead_head = 0, ahead_chunks = 0;  // what comes after a chunk: whose, how far from it

    Head(const Attention& op, bool back, Memory& shared)
        : op(op), K(op.key_width()), D(op.v.sizes[3]), L(op.latents()), Kp(whole<T>(K)),
          Dp(whole<T>(D)), Lp(whole<T>(L)), Lq(Lp + W), size(op.v.bytes_each()), S(op.sinks()),
          Sp(whole<T>(S)), near(op.near()), far(op.far()), back(back), forgets(op.forgets()),
          delay(op.delay), late(far && delay), shared(far && !delay), column(near ? W - 1 : W),
          task(op, 0) {
        const int64_t longest = op.tokens() + op.tail();
        reach = least(op.window, longest) - 1;  // -1: nothing is near
        slots = (reach + late + TOKENS - 1) / TOKENS + 1;  // late: and the token that leaves
        columns = slots * TOKENS, base = columns - TOKENS, ld = columns + Sp;
        for (Memory* memory : {&own_memory, &shared}) {
            for (int pass = 0; pass < 2; ++pass) {  // first how much, then where
                memory->used = 0;
                auto room = [&](int64_t count) { return memory->template room<T>(count); };
                if (memory == &shared) divide(room);
                else divide_own(room);
                if (!pass) memory->reserve();
            }
        }
    }

    template <class Room>
    void divide_own(const Room& room) {
        ring.assign(size_t(slots), Keys<T>{});
        for (Keys<T>& s : ring) {
            s.k = room(TOKENS * Kp), s.k_panels = room(TOKENS * K), s.v = room(TOKENS * Dp);
            s.hidden = room(TOKENS);
            if (!back) continue;
            s.v_panels = room(TOKENS * D);
            s.dk = room(TOKENS * Kp), s.dv = room(TOKENS * Dp);
        }
        sinks.k = room(Sp * Kp), sinks.k_panels = room(Sp * K), sinks.v = room(Sp * Dp);
        if (back) {
            sinks.v_panels = room(Sp * D);
            sinks.dk = room(Sp * Kp), sinks.dv = room(Sp * Dp);
        }
        state = {room(Lp), room(Lp), room(Lp * Dp)};
        if (back) reverse = room(Lp * Dp), scalar = room(Lp);
    }

    template <class Room>
    void divide(const Room& room) {
        queries = room(TOKENS * Kp), logits = room(TOKENS * ld);
        sink_queries = room(S ? TOKENS * Kp : 0);
        scores = room(late ? TOKENS * TOKENS : 0), late_v = room(late ? TOKENS * Dp : 0);
        weights = back ? room(TOKENS * ld) : logits, p = room(TOKENS * Lq + W);
        keys = room(TOKENS * Lp), e = room(TOKENS * Lp), e_panels = room(TOKENS * Lp);
        alpha = room(TOKENS * Lp), ratio = room(TOKENS * Lp), out = room(TOKENS * Dp);
        tops = room(Lp), own = room(Lp), totals = room(TOKENS);
        decays = room(forgets ? TOKENS * Lp : 0), forgotten = room(TOKENS * Lp);
        if (!back) return;
        dy = room(TOKENS * Dp), pairs = room(TOKENS * ld);
        late_panels = room(late ? TOKENS * D : 0), late_pairs = room(late ? TOKENS * TOKENS : 0);
        late_dv = room(late ? TOKENS * Dp : 0);
        slope = room(op.softcap ? TOKENS * ld : 0), before = room(TOKENS * TOKENS);
        delta = room(TOKENS * Lp), lost = room(TOKENS * Lp), pulled = room(TOKENS * Lq + W);
        dkeys = room(TOKENS * Lp), turned = room(Dp * Lp);
    }

    Keys<T>& slot(int64_t chunk) { return ring[size_t(((chunk % slots) + slots) % slots)]; }
    int64_t rows_of(int64_t chunk) const { return least(TOKENS, task.count - chunk * TOKENS); }
    bool real(int64_t token) const {
        return !op.mask || op.mask.at<bool>()[task.row * op.tokens() + task.begin + token];
    }
    // Whether there is a source for latents: a real token, or a pending one before the first.
    bool source(int64_t token) const {
        if (token >= 0) return real(token);
        return op.pending_k && op.pending_mask.at<bool>()[(task.n + 1) * delay + token];
    }

    // Asks for the memory of a token that is read, or written, soon: rows of one head are too far
    // apart to be foreseen.
    void ask(const Tensor& x, int64_t token, int64_t head, int64_t size) const {
        if (token < 0 || token >= task.count) return;
        const char* at = x.data + size * place(x, task.row, task.begin + token, head);
        for (int64_t byte = 0; byte < x.sizes[3] * size; byte += 64) __builtin_prefetch(at + byte);
    }
    void ask_around(int64_t chunk, int64_t i) const {
        const int64_t here = chunk * TOKENS + i, next = here + ahead_chunks * TOKENS;
        const int64_t keys = back ? next - base : next, h = ahead_head;
        const int64_t g = h / (op.heads() / op.groups());
        if (far) ask(op.latent_q, next, h, size), ask(op.latent_k, next - delay, h, size);
        if (forgets) ask(op.log_decay, next, h, sizeof(T));
        if (near) ask(op.q, next, h, size), ask(op.k, keys, g, size);
        ask(op.v, keys, g, size);
        if (S) ask(op.sink_q, next, h, size);
        if (back) ask(op.dout, next, h, size);
        if (!back) return ask(op.out, here, task.h, size);
        ask(op.dv, here, task.h, size);
        if (far) ask(op.dlatent_q, here, task.h, size), ask(op.dlatent_k, here - delay, task.h, size);
        if (S) ask(op.dsink_q, here, task.h, size);
        if (forgets) ask(op.dlog_decay, here, task.h, sizeof(T));
        if (near) ask(op.dq, here, task.h, size), ask(op.dk, here, task.h, size);
    }

    // The places of keys that query i of a chunk may see, among its columns.
    int64_t first_key(int64_t chunk, int64_t i) const {
        return base + most(i - reach, low - chunk * TOKENS);
    }
    int64_t last_key(int64_t i) const { return base + i; }
    Span near_span(int64_t chunk, int64_t i) const {
        return {first_key(chunk, i), last_key(i) + 1};
    }
    // The columns of the sinks that query i of a chunk sees.
    Span sink_span(int64_t chunk, int64_t i) const {
        if (!S) return {columns, columns};
        const int64_t token = task.begin + chunk * TOKENS + i;
        return {columns, columns + op.sinks_seen.at<int64_t>()[task.row * op.tokens() + token]};
    }

    // Keys and values of a chunk; of chunks before the first one those of the earlier state.
    void load_keys(int64_t chunk) {
        Keys<T>& s = slot(chunk);
        const int64_t first = chunk * TOKENS, P = op.tail();
        int64_t from = 0, stop = TOKENS;
        s.masked = false;
        if (first >= 0) {
            stop = rows_of(chunk);
            if (near) take(op.k, task.row, task.begin + first, task.g, stop, s.k, Kp);
            take(op.v, task.row, task.begin + first, task.g, stop, s.v, Dp);
        } else {
            from = most(0, -P - first);
            if (from >= TOKENS) return;
            take(op.tail_k, task.n, P + first + from, task.g, stop - from, s.k + from * Kp, Kp);
            take(op.tail_v, task.n, P + first + from, task.g, stop - from, s.v + from * Dp, Dp);
        }
        for (int64_t i = from; i < stop; ++i) {
            const bool seen = first >= 0 ? real(first + i)
                                         : op.tail_mask.at<bool>()[task.n * P + P + first + i];
            s.hidden[i] = seen ? T(0) : lowest;
            if (seen) continue;
            s.masked = true;
            std::memset(s.k + i * Kp, 0, size_t(Kp) * sizeof(T));
            std::memset(s.v + i * Dp, 0, size_t(Dp) * sizeof(T));
        }
        turn(s.k, Kp, from, stop, K, s.k_panels);
        s.strange = not_finite(s.v + from * Dp, (stop - from) * Dp);
        if (!back) return;
        turn(s.v, Dp, from, stop, D, s.v_panels);
        std::memset(s.dk, 0, size_t(TOKENS * Kp) * sizeof(T));
        std::memset(s.dv, 0, size_t(TOKENS * Dp) * sizeof(T));
    }

    // The sinks of a sequence; masked ones are zeros already.
    void load_sinks() {
        take(op.sink_k, task.n, 0, task.g, S, sinks.k, Kp);
        take(op.sink_v, task.n, 0, task.g, S, sinks.v, Dp);
        turn(sinks.k, Kp, 0, S, K, sinks.k_panels);
        sinks.strange = not_finite(sinks.v, S * Dp);
        if (!back) return;
        turn(sinks.v, Dp, 0, S, D, sinks.v_panels);
        std::memset(sinks.dk, 0, size_t(Sp * Kp) * sizeof(T));
        std::memset(sinks.dv, 0, size_t(Sp * Dp) * sizeof(T));
    }

    // to[i][columns + s] = <x_i, sink s>, of keys or values.
    void against_sinks(int64_t rows, const T* x, int64_t ldx, int64_t n, const T* panels, T* to) {
        for (int64_t c = 0; c < S; c += W) {
            T* at = to + columns + c;
            if (S - c <= half_width<T>) half_product(at, ld, rows, x, ldx, panels + c * n, W, n);
            else product(at, ld, false, rows, W, x, ldx, int64_t(1), panels + c * n, W, n);
        }
    }

    // Adds the sinks' part to the outputs: a query multiplies those that it sees.
    void with_sinks(int64_t chunk, int64_t rows, const T* x, T* to) {
        const int64_t together = sinks.strange ? 1 : ROWS;
        for (int64_t i = 0; i < rows; i += together) {
            const int64_t count = least(together, rows - i);
            const Span seen = sink_span(chunk, i + count - 1);
            if (seen.stop == columns) continue;
            for (int64_t d = 0; d < Dp; d += W)
                tile(count, to + i * Dp + d, Dp, true, x + i * ld + columns, ld, 1, sinks.v + d, Dp,
                     seen.stop - columns);
        }
    }

    // to[i][s] = <x_i, key s> for the keys that a query reads; all of its own chunk if `own`.
    void against(int64_t chunk, int64_t rows, const T* x, int64_t ldx, int64_t n, bool values,
                 bool own, T* to) {
        for (int64_t j = 0; j < slots; ++j) {
            const Keys<T>& s = slot(chunk - slots + 1 + j);
            const T* panel = values ? s.v_panels : s.k_panels;
            for (int64_t c = j * TOKENS; c < (j + 1) * TOKENS; c += W, panel += n * W) {
                for (int64_t i = 0; i < rows; i += ROWS) {
                    const int64_t count = least(ROWS, rows - i);
                    int64_t first = first_key(chunk, i);
                    if (own) first = least(first, base);
                    if (c + W <= first || c > last_key(i + count - 1)) continue;
                    tile(count, to + i * ld + c, ld, false, x + i * ldx, ldx, 1, panel,
                         W, n);
                }
            }
        }
    }

    // to (rows begin ... end) = sum over keys of x[i][s] times their rows; x is 0 outside the band.
    void with_keys(int64_t chunk, int64_t begin, int64_t end, const T* x, bool values, bool own,
                   T* to) {
        const int64_t n = values ? Dp : Kp;
        int64_t together = ROWS;
        for (int64_t j = first_key(chunk, begin) / TOKENS; j < slots; ++j)
            if (slot(chunk - slots + 1 + j).strange) together = 1;
        for (int64_t d = 0; d < n; d += W) {
            for (int64_t i = begin; i < end; i += together) {
                const int64_t count = least(together, end - i), last = last_key(i + count - 1);
                int64_t first = first_key(chunk, i);
                if (own) first = least(first, base);
                bool add = false;
                for (int64_t j = first / TOKENS; j < slots; ++j) {
                    const int64_t from = most(first, j * TOKENS);
                    const int64_t stop = least(last + 1, (j + 1) * TOKENS);
                    const Keys<T>& s = slot(chunk - slots + 1 + j);
                    tile(count, to + i * n + d, n, add, x + i * ld + from, ld, 1,
                         (values ? s.v : s.k) + (from - j * TOKENS) * n + d, n, stop - from);
                    add = true;
                }
            }
        }
    }

    // Adds sum over queries of x[i][s] y_i to the gradients of the keys, or of the values.
    void to_keys(int64_t chunk, int64_t rows, const T* x, const T* y, bool values, bool own) {
        const int64_t n = values ? Dp : Kp;
        for (int64_t j = 0; j < slots; ++j) {
            Keys<T>& s = slot(chunk - slots + 1 + j);
            T* to = values ? s.dv : s.dk;
            const int64_t from = most(0, base + low - chunk * TOKENS - j * TOKENS);
            const int64_t stop = j == slots - 1 ? rows : TOKENS;
            for (int64_t d = 0; d < n; d += W) {
                for (int64_t i = from; i < stop; i += ROWS) {
                    const int64_t count = least(ROWS, stop - i), c = j * TOKENS + i - base;
                    const int64_t first = most(0, c);
                    int64_t last = least(rows - 1, c + count - 1 + reach);
                    if (own && j == slots - 1) last = rows - 1;
                    if (last < first) continue;
                    tile(count, to + i * n + d, n, true, x + first * ld + j * TOKENS + i, 1, ld,
                         y + first * n + d, n, last - first + 1);
                }
            }
        }
    }

    // Zeros around what a query sees, as far as a tile reads, and in all of its own chunk if `own`;
    // there are zeros already in the vectors in which that begins and ends.
    void clear_around(int64_t chunk, int64_t i, bool own, T* x) {
        for (int64_t c = columns + whole<T>(sink_span(chunk, i).stop - columns); c < ld; c += W)
            store_all(x + c, V<T>{});
        const int64_t first = first_key(chunk, i), stop = last_key(i) + 1;
        int64_t from = most(0, first - ROWS);
        if (own) from = least(from, base);
        for (int64_t c = from / W * W; c < first / W * W; c += W) store_all(x + c, V<T>{});
        for (int64_t c = (stop + W - 1) / W * W; c < least(columns, stop + ROWS); c += W)
            store_all(x + c, V<T>{});
    }

    // p of the latents' queries, in p; and of the window's scores weights, in logits: forward times
    // the window's p, which is all of a query's weights but those of the latents.
    void probabilities(int64_t chunk, int64_t rows) {
        const int64_t token = task.begin + chunk * TOKENS;
        if (far) take(op.latent_q, task.row, token, task.h, rows, p + column, Lq);
        for (int64_t i = 0; i < rows; ++i) {
            ask_around(chunk, i);
            if (!op.joint) mix(chunk, i);
        }
        if (!near && !back) std::memset(weights, 0, size_t(rows * ld) * sizeof(T));
        if (!near) return;
        take(op.q, task.row, token, task.h, rows, queries, Kp, T(op.scale));
        against(chunk, rows, queries, Kp, K, false, false, logits);
        if (S) {
            take(op.sink_q, task.row, token, task.h, rows, sink_queries, Kp, T(op.scale));
            against_sinks(rows, sink_queries, Kp, K, sinks.k_panels, logits);
        }
        for (int64_t i = 0; i < rows; ++i) {
            T* x = logits + i * ld;
            const Span own = near_span(chunk, i), more = sink_span(chunk, i);
            const int64_t first = own.first, stop = own.stop;
            if (op.softcap) cap(x, slope + (back ? i * ld : 0), own, more);
            for (int64_t c = more.first; c < more.stop; ++c)
                if (!op.sink_mask.at<bool>()[task.n * S + c - columns]) x[c] = lowest;
            for (int64_t j = first / TOKENS; j < slots; ++j) {
                const Keys<T>& s = slot(chunk - slots + 1 + j);
                if (!s.masked) continue;
                for (int64_t c = most(first, j * TOKENS); c < least(stop, (j + 1) * TOKENS); ++c)
                    x[c] = s.hidden[c - j * TOKENS] < T(0) ? lowest : x[c];
            }
            const Exponentials<T> e = exponentiate(x, own, more);
            if (op.joint) {
                p[i * Lq + W - 1] += e.sum == T(0) ? lowest : e.top + std::log(e.sum);
                mix(chunk, i);
            }
            normalise(x, own, more, e.sum, back ? T(1) : p[i * Lq + W - 1]);
            if (!back) clear_around(chunk, i, shared, x);
        }
    }

    // p of query i, from the logits in its place: all of it the window's if there are no latents, or
    // late ones that have seen nothing.
    void mix(int64_t chunk, int64_t i) {
        T* x = p + i * Lq;
        if (far) soften(x, {column, W + L}, {0, 0}, T(1));
        const bool alone = late && chunk * TOKENS + i < heard;
        if (alone) std::memset(x + W, 0, size_t(Lp) * sizeof(T));
        if (alone || !far) x[W - 1] = 1;
    }

    // softcap tanh(x / softcap), and its slope.
    void cap(T* x, T* slopes, Span own, Span more) {
        vectors<T>(own, more, [&](int64_t c, Span) {
            V<T> y = load_all(x + c) * T(1.0 / op.softcap);
            Mask<T> negative = y < T(0);
            Decay<T> twice = decay(select(negative, y, -y) * T(2));
            V<T> tanh = twice.lost / (twice.kept + T(1));
            if (back) store_all(slopes + c, T(1) - tanh * tanh);
            store_all(x + c, select(negative, -tanh, tanh) * T(op.softcap));
        });
    }

    // The rows of a chunk whose latents are fed with what is pending: tokens before the first.
    int64_t pending_rows(int64_t chunk, int64_t rows) const {
        return least(rows, most(0, delay - chunk * TOKENS));
    }

    // What the latents are fed with at a chunk's tokens, of x or, before its first, of what is
    // pending: rows of T, zeros up to n; anything where there is no source.
    void take_sources(const Tensor& x, const Tensor& pending, int64_t head, int64_t chunk,
                      int64_t rows, T* to, int64_t n) {
        const int64_t first = chunk * TOKENS - delay, old = pending_rows(chunk, rows);
        if (old && pending) take(pending, task.n, delay + first, head, old, to, n);
        if (old == rows) return;
        take(x, task.row, task.begin + first + old, head, rows - old, to + old * n, n);
    }

    // The latents' logits of a chunk, -inf where they count for nothing, and what they forget.
    void load_logits(int64_t chunk, int64_t rows) {
        const int64_t token = task.begin + chunk * TOKENS;
        take_sources(op.latent_k, op.pending_k, task.h, chunk, rows, keys, Lp);
        for (int64_t i = 0; i < rows; ++i) {
            const bool seen = source(chunk * TOKENS - delay + i);
            for (int64_t l = seen ? L : 0; l < Lp; ++l) keys[i * Lp + l] = lowest;
        }
        if (forgets) take(op.log_decay, task.row, token, task.h, rows, decays, Lp);
    }

    // Moves the state to another reference, `to` or the present one if that is larger.
    void refer(const T* to) {
        for (int64_t l = 0; l < L; ++l)
            if (to[l] > state.top[l]) rescale(l, to[l], std::exp(state.top[l] - to[l]));
    }
    void rescale(int64_t l, T top, T factor) {
        state.top[l] = top, state.mass[l] *= factor;
        for (int64_t d = 0; d < Dp; ++d) state.sum[l * Dp + d] *= factor;
    }

    // The state after a run: its reference falls by what was forgotten, to the nearest number, and
    // what is left of that goes into the sums.
    void forget(const T* decay) {
        for (int64_t l = 0; l < L; ++l) {
            if (decay[l] == T(0) || state.top[l] == lowest) continue;
            const double top = double(state.top[l]) + double(decay[l]);
            rescale(l, T(top), T(std::exp(top - double(T(top)))));
        }
    }

    // What latents l ... forget from the start of a run to row i, its own part included.
    V<T> forget_at(int64_t begin, int64_t i, int64_t l) {
        V<T> sum = load_all(decays + i * Lp + l);
        if (i > begin) sum = sum + load_all(forgotten + (i - 1) * Lp + l);
        store_all(forgotten + i * Lp + l, sum);
        return sum;
    }

    // Where a run that begins at row `begin` ends. The state moves to its references; the largest
    // keys in it are in tops.
    int64_t find_end(int64_t begin, int64_t rows) {
        for (int64_t i = begin; i < rows; ++i) {
            bool beyond = false;
            for (int64_t l = 0; l < Lp; l += W) {
                V<T> key = load_all(keys + i * Lp + l), reach = all(T(REACH));
                if (forgets) {
                    V<T> sum = forget_at(begin, i, l);
                    key = key - sum, reach = select(sum < T(0), all(T(FORGETTING_REACH)), reach);
                }
                beyond |= any(load_all(state.top + l) + reach < key);
                store_all(own + l, key);
            }
            if (i == begin) refer(own);
            else if (beyond) return i;
            for (int64_t l = 0; l < Lp; l += W) {
                V<T> key = load_all(own + l);
                store_all(tops + l, i == begin ? key : larger(load_all(tops + l), key));
            }
        }
        return rows;
    }

    // e, alpha and p / alpha of a run; what has seen nothing has alpha = 0 and a ratio of 0.
    void scale_keys(const LatentRun<T>& run) {
        for (int64_t l = 0; l < Lp; l += W) {
            V<T> top = load_all(run.before.top + l), mass = load_all(run.before.mass + l);
            top = select(all(lowest) < top, top, V<T>{});
            for (int64_t i = run.begin; i < run.end; ++i) {
                V<T> x = load_all(keys + i * Lp + l) - top;  // of large logits it is exact
                if (forgets) x = x - load_all(forgotten + i * Lp + l);
                x = decay(x).kept;
                mass = mass + x;
                V<T> share = load_all(p + i * Lq + W + l) / mass;
                store_all(e + i * Lp + l, x);
                store_all(alpha + i * Lp + l, mass);
                store_all(ratio + i * Lp + l, select(all(T(0)) < mass, share, mass));
            }
        }
    }

    // The next run of a chunk, with the state moved to its references.
    LatentRun<T> next_run(int64_t begin, int64_t rows) {
        const int64_t end = find_end(begin, rows);
        return {begin, end, state, forgotten + (end - 1) * Lp};
    }

    // Takes the run's sources in.
    void take_in(const LatentRun<T>& run, const T* v) {
        product(state.sum, Dp, true, L, Dp, e + run.begin * Lp, int64_t(1), Lp, v + run.begin * Dp,
                Dp, run.end - run.begin);
        std::memcpy(state.mass, alpha + (run.end - 1) * Lp, size_t(L) * sizeof(T));
        refer(tops);
        if (forgets) forget(run.forgotten);
    }

    // Adds sum_l ratio_t[l] e_s[l] to x[t][s] for the sources s <= t of a run.
    void add_scores(const LatentRun<T>& run, T* x, int64_t ldx) {
        turn(e, Lp, run.begin, run.end, Lp, e_panels);
        for (int64_t i = run.begin; i < run.end; i += ROWS) {
            const int64_t count = least(ROWS, run.end - i);
            for (int64_t c = run.begin / W * W; c < i + count; c += W) {
                const T *rows = ratio + i * Lp, *panel = e_panels + c * Lp;
                if (c >= run.begin && c + W <= i + 1) {
                    tile(count, x + i * ldx + c, ldx, true, rows, Lp, 1, panel, W, L);
                    continue;
                }
                alignas(64) T some[ROWS * W];
                tile(count, some, W, false, rows, Lp, 1, panel, W, L);
                for (int64_t m = 0; m < count; ++m) {
                    T* to = x + (i + m) * ldx + c;
                    V<T> seen = within(load_all(some + m * W), V<T>{}, c, run.begin, i + m + 1);
                    store_all(to, load_all(to) + seen);
                }
            }
        }
    }

    void begin_task(int64_t number) {
        task = HeadTask(op, number);
        low = op.tail_k ? -op.tail() : 0;
        if (late) find_heard();
        if (S) load_sinks();
        for (int64_t l = 0; l < Lp; ++l) state.top[l] = lowest, state.mass[l] = 0;
        std::memset(state.sum, 0, size_t(Lp * Dp) * sizeof(T));
        if (!op.log_mass) return;  // also if there are no latents
        const int64_t at = (task.n * op.heads() + task.h) * L;
        for (int64_t l = 0; l < L; ++l) {
            state.top[l] = op.log_mass.at<T>()[at + l];
            if (state.top[l] == lowest) continue;
            state.mass[l] = 1;
            std::memcpy(state.sum + l * Dp, op.mean.at<T>() + (at + l) * D, size_t(D) * sizeof(T));
        }
    }

    // Whether the sequence's state holds anything, else the first token that feeds its latents.
    void find_heard() {
        heard = 0;
        const int64_t count = op.heads() * L;
        for (int64_t i = 0; op.log_mass && i < count; ++i)
            if (op.log_mass.at<T>()[task.n * count + i] != lowest) return;
        while (heard < task.count && !source(heard - delay)) ++heard;
    }

    int64_t kept_at(int64_t segment) const {
        return ((task.first_kept + segment) * op.heads() + task.h) * L;
    }

    int64_t chunks() const { return (task.count + TOKENS - 1) / TOKENS; }

    void begin_forward(int64_t number) {
        begin_task(number);
        for (int64_t c = 1 - slots; c < 0 && chunks(); ++c)
            if ((c + 1) * TOKENS > low) load_keys(c);
    }

    void forward_chunk(int64_t c) {
        const int64_t rows = rows_of(c);
        if (far && c * TOKENS % SEGMENT == 0) {
            const int64_t at = kept_at(c * TOKENS / SEGMENT);
            std::memcpy(op.kept_top.at<T>() + at, state.top, size_t(L) * sizeof(T));
            std::memcpy(op.kept_mass.at<T>() + at, state.mass, size_t(L) * sizeof(T));
            for (int64_t l = 0; l < L; ++l)
                std::memcpy(op.kept_sum.at<T>() + (at + l) * D, state.sum + l * Dp,
                            size_t(D) * sizeof(T));
        }
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
            product(out + begin * Dp, Dp, true, run.end - begin, Dp, ratio + begin * Lp, Lp,
                    int64_t(1), state.sum, Dp, L);
            take_in(run, late ? late_v : slot(c).v);
            begin = run.end;
        }
        if (S) with_sinks(c, rows, weights, out);
        put(op.out, task.row, task.begin + c * TOKENS, task.h, rows, out, Dp);
    }

    // Adds to the outputs what late latents have been fed in a run, up to a query's own.
    void with_late(const LatentRun<T>& run, bool strange) {
        const int64_t begin = run.begin, together = strange ? 1 : ROWS;
        for (int64_t d = 0; d < Dp; d += W)
            for (int64_t i = begin; i < run.end; i += together) {
                const int64_t count = least(together, run.end - i);
                tile(count, out + i * Dp + d, Dp, true, scores + i * TOKENS + begin, TOKENS, 1,
                     late_v + begin * Dp + d, Dp, i + count - begin);
            }
    }

    void end_forward() {
        const int64_t at = (task.n * op.heads() + task.h) * L;
        for (int64_t l = 0; l < L; ++l) {
            const T mass = state.mass[l];
            op.last_mass.at<T>()[at + l] = mass == T(0) ? lowest : state.top[l] + std::log(mass);
            for (int64_t d = 0; d < D; ++d)
                op.last_mean.at<T>()[(at + l) * D + d] =
                    mass == T(0) ? T(0) : state.sum[l * Dp + d] / mass;
        }
    }

    // The window's part of a query's weights.
    void share_out(int64_t chunk, int64_t i) {
        const T *from = logits + i * ld, share = p[i * Lq + W - 1];
        T* to = weights + i * ld;
        vectors<T>(near_span(chunk, i), sink_span(chunk, i), [&](int64_t c, Span s) {
            store_all(to + c, within(load_all(from + c) * share, V<T>{}, c, s.first, s.stop));
        });
        clear_around(chunk, i, shared, to);
    }

    // The runs of a segment and the states before them: from the state kept, once more forward.
    void walk_segment(int64_t segment) {
        const int64_t at = kept_at(segment), one = 3 * Lp + Lp * Dp;
        std::memcpy(state.top, op.kept_top.at<T>() + at, size_t(L) * sizeof(T));
        std::memcpy(state.mass, op.kept_mass.at<T>() + at, size_t(L) * sizeof(T));
        for (int64_t l = 0; l < L; ++l)
            std::memcpy(state.sum + l * Dp, op.kept_sum.at<T>() + (at + l) * D,
                        size_t(D) * sizeof(T));
        runs.clear(), saved.clear();
        const int64_t first = segment * (SEGMENT / TOKENS);
        const int64_t stop = least(first + SEGMENT / TOKENS, (task.count + TOKENS - 1) / TOKENS);
        for (int64_t c = first; c < stop; ++c) {
            const int64_t rows = rows_of(c);
            load_logits(c, rows);
            load_values(c, rows, out);
            for (int64_t begin = 0; begin < rows;) {
                LatentRun<T> run = next_run(begin, rows);
                saved.insert(saved.end(), state.top, state.top + Lp);
                saved.insert(saved.end(), state.mass, state.mass + Lp);
                saved.insert(saved.end(), state.sum, state.sum + Lp * Dp);
                saved.insert(saved.end(), run.forgotten, run.forgotten + Lp);
                scale_keys(run);
                take_in(run, out);
                begin = run.end;
                run.begin += c * TOKENS, run.end += c * TOKENS;
                runs.push_back(run);
            }
        }
        for (size_t r = 0; r < runs.size(); ++r) {
            T* before = saved.data() + int64_t(r) * one;
            runs[r].before = {before, before + Lp, before + 2 * Lp};
            runs[r].forgotten = before + 2 * Lp + Lp * Dp;
        }
    }

    // Values that the latents are fed with at a chunk's tokens, zeros where there is no source.
    void load_values(int64_t chunk, int64_t rows, T* to) {
        take_sources(op.v, op.pending_v, task.g, chunk, rows, to, Dp);
        for (int64_t i = 0; i < rows; ++i)
            if (!source(chunk * TOKENS - delay + i))
                std::memset(to + i * Dp, 0, size_t(Dp) * sizeof(T));
    }

    // From the gradient of the state after the last token: R and its scalar, relative to its top.
    void begin_reverse() {
        std::memset(reverse, 0, size_t(Lp * Dp) * sizeof(T));
        const Tensor &dmass = op.dlast_mass, &dmean = op.dlast_mean;
        for (int64_t l = 0; l < Lp; ++l) {
            scalar[l] = 0;
            if (l >= L || state.mass[l] == T(0)) continue;
            const T mass = state.mass[l];
            const T* from = dmean.at<T>() + task.n * dmean.strides[0] + task.h * dmean.strides[1] +
                            l * dmean.strides[2];
            for (int64_t d = 0; d < D; ++d) {
                reverse[l * Dp + d] = from[d * dmean.strides[3]] / mass;
                scalar[l] += reverse[l * Dp + d] * (state.sum[l * Dp + d] / mass);
            }
            scalar[l] -= dmass.at<T>()[task.n * dmass.strides[0] + task.h * dmass.strides[1] +
                                       l * dmass.strides[2]] / mass;
        }
    }

    // R and its scalar relative to the reference of an earlier run instead of `from`.
    void refer_back(const T* from, const LatentRun<T>& run) {
        for (int64_t l = 0; l < L; ++l) {
            const T to = run.before.top[l], decay = run.forgotten[l];
            if (from[l] == to && (decay == T(0) || to == lowest)) continue;
            const T factor = T(std::exp(double(to) - double(from[l]) + double(decay)));
            scalar[l] *= factor;
            for (int64_t d = 0; d < Dp; ++d) reverse[l * Dp + d] *= factor;
        }
    }

    void begin_backward(int64_t number) {
        begin_task(number);
        if (chunks() && far) walk_segment((task.count - 1) / SEGMENT);
        if (far) begin_reverse();
        if (late)  // the last tokens have reached no latent
            for (int64_t i = most(0, task.count - delay); i < task.count; ++i)
                std::memset(op.dlatent_k.data +
                                place(op.dlatent_k, task.row, task.begin + i, task.h) * size,
                            0, size_t(L * size));
        top.assign(state.top, state.top + Lp);
        for (int64_t c = chunks() - slots + 1; c < chunks() && chunks(); ++c)
            if ((c + 1) * TOKENS > low) load_keys(c);
    }

    void backward_chunk(int64_t c) {
        const int64_t oldest = c - slots + 1;
        if ((oldest + 1) * TOKENS > low) load_keys(oldest);
        pull(c);
        Keys<T>& s = slot(c);
        const int64_t token = task.begin + c * TOKENS, rows = rows_of(c);
        if (near) put(op.dk, task.row, token, task.h, rows, s.dk, Kp);
        put(op.dv, task.row, token, task.h, rows, s.dv, Dp);
        if (far && c && c * TOKENS % SEGMENT == 0) walk_segment(c * TOKENS / SEGMENT - 1);
    }

    void end_backward() {
        if (S) {
            put(op.dsink_k, task.n, 0, task.h, S, sinks.dk, Kp);
            put(op.dsink_v, task.n, 0, task.h, S, sinks.dv, Dp);
        }
        if (op.tail_k) end_tail();
        if (op.log_mass) end_state();
    }

    // Gradients of the tail's keys and values: 0 for those that no query has reached.
    void end_tail() {
        const int64_t P = op.tail();
        for (int64_t c = (-P - TOKENS + 1) / TOKENS; c < 0; ++c) {
            const int64_t first = c * TOKENS, from = most(0, -P - first);
            Keys<T>& s = slot(c);
            if (!chunks() || c < 1 - slots) {
                std::memset(s.dk, 0, size_t(TOKENS * Kp) * sizeof(T));
                std::memset(s.dv, 0, size_t(TOKENS * Dp) * sizeof(T));
            }
            put(op.dtail_k, task.n, P + first + from, task.h, TOKENS - from, s.dk + from * Kp, Kp);
            put(op.dtail_v, task.n, P + first + from, task.h, TOKENS - from, s.dv + from * Dp, Dp);
        }
    }

    // An empty state has no mass to move and a mean that nobody reads: no gradient.
    void end_state() {
        const int64_t at = (task.n * op.heads() + task.h) * L;
        for (int64_t l = 0; l < L; ++l) {
            T* dmean = op.dmean.at<T>() + (at + l) * D;
            const T* mean = op.mean.at<T>() + (at + l) * D;
            const T first = op.log_mass.at<T>()[at + l];
            const T mass = first == lowest ? T(0) : std::exp(first - top[size_t(l)]);
            T total = 0;
            for (int64_t d = 0; d < D; ++d) {
                dmean[d] = mass == T(0) ? T(0) : mass * reverse[l * Dp + d];
                if (mass != T(0)) total += dmean[d] * mean[d];
            }
            op.dlog_mass.at<T>()[at + l] = mass == T(0) ? T(0) : total - mass * scalar[l];
        }
    }

    void pull(int64_t c) {
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
        for (int64_t i = 0; i < rows * Kp; ++i) queries[i] *= T(op.scale);
        put(op.dq, task.row, token, task.h, rows, queries, Kp);
    }

    // The sinks' part: of their values by the weights, of keys and queries by the logits' gradients.
    void backward_sinks(int64_t c, int64_t rows) {
        const T *shares = weights + columns, *dlogits = logits + columns;
        product(sinks.dv, Dp, true, S, Dp, shares, int64_t(1), ld, dy, Dp, rows);
        product(sinks.dk, Kp, true, S, Kp, dlogits, int64_t(1), ld, sink_queries, Kp, rows);
        product(sink_queries, Kp, false, rows, Kp, dlogits, ld, int64_t(1), sinks.k, Kp, S);
        for (int64_t i = 0; i < rows * Kp; ++i) sink_queries[i] *= T(op.scale);
        put(op.dsink_q, task.row, task.begin + c * TOKENS, task.h, rows, sink_queries, Kp);
    }

    // Values of late sources, and <dy_t, v_s> of those that a query's latents have been fed.
    void load_late(int64_t c, int64_t rows) {
        load_values(c, rows, late_v);
        turn(late_v, Dp, 0, rows, D, late_panels);
        for (int64_t s = 0; s < rows; s += W)
            for (int64_t i = s / ROWS * ROWS; i < rows; i += ROWS)
                tile(least(ROWS, rows - i), late_pairs + i * TOKENS + s, TOKENS, false, dy + i * Dp,
                     Dp, 1, late_panels + s * D, W, D);
        std::memset(scores, 0, size_t(rows * TOKENS) * sizeof(T));
    }

    // Gradients of late values by the scores alone: of each, from the queries after it.
    void to_late(int64_t rows) {
        for (int64_t d = 0; d < Dp; d += W)
            for (int64_t i = 0; i < rows; i += ROWS)
                tile(least(ROWS, rows - i), late_dv + i * Dp + d, Dp, false,
                     scores + i * TOKENS + i, 1, TOKENS, dy + i * Dp + d, Dp, rows - i);
    }

    // Gradients of late sources: to the chunks of keys that they are in, or to what is pending.
    void put_late(int64_t c, int64_t rows) {
        const int64_t first = c * TOKENS - delay, old = pending_rows(c, rows);
        if (old && op.pending_k) {
            put(op.dpending_k, task.n, delay + first, task.h, old, dkeys, Lp);
            put(op.dpending_v, task.n, delay + first, task.h, old, late_dv, Dp);
        }
        for (int64_t i = old; i < rows; ++i) {
            const int64_t token = first + i;
            T* to = slot(token / TOKENS).dv + token % TOKENS * Dp;
            for (int64_t d = 0; d < Dp; d += W)
                store_all(to + d, load_all(to + d) + load_all(late_dv + i * Dp + d));
        }
        if (old < rows)
            put(op.dlatent_k, task.row, task.begin + first + old, task.h, rows - old,
                dkeys + old * Lp, Lp);
    }

    // The latents' part, and with it that of all weights in the gradients of the values they share.
    void backward_latents(int64_t c, int64_t rows) {
        const int64_t token = task.begin + c * TOKENS;
        load_logits(c, rows);
        if (late) load_late(c, rows);
        size_t first = runs.size();
        while (first && runs[first - 1].begin >= c * TOKENS) --first;
        for (size_t r = first; r < runs.size(); ++r) {
            runs[r].begin -= c * TOKENS, runs[r].end -= c * TOKENS;
            for (int64_t i = runs[r].begin; forgets && i < runs[r].end; ++i)
                for (int64_t l = 0; l < Lp; l += W) forget_at(runs[r].begin, i, l);
            scale_keys(runs[r]);
            if (late) add_scores(runs[r], scores, TOKENS);
            else add_scores(runs[r], weights + base, ld);
        }
        if (late) to_late(rows);
        else to_keys(c, rows, weights, dy, true, true);
        for (; runs.size() > first; runs.pop_back()) {
            const LatentRun<T>& run = runs.back();
            refer_back(top.data(), run);
            top.assign(run.before.top, run.before.top + Lp);
            if (late) backward_run(run, late_v, late_dv, late_pairs, TOKENS);
            else backward_run(run, slot(c).v, slot(c).dv, pairs + base, ld);
        }
        for (int64_t i = 0; i < rows; ++i) {  // through the softmax over the latents and the window
            T *x = pulled + i * Lq, *y = p + i * Lq, total = 0;
            for (int64_t l = column; l < W + L; ++l) total += x[l];
            for (int64_t l = column; l < W + L; ++l) x[l] -= y[l] * total;
            totals[i] = total;
        }
        put(op.dlatent_q, task.row, token, task.h, rows, pulled + column, Lq);
        if (late) put_late(c, rows);
        else put(op.dlatent_k, task.row, token, task.h, rows, dkeys, Lp);
        if (forgets) put(op.dlog_decay, task.row, token, task.h, rows, decays, Lp);
    }

    // From weights in logits and <dy, v> in pairs: the weights' part in `weights`, the gradients of
    // the scores in logits, and p_t[0] times its gradient.
    void through_window(int64_t chunk, int64_t i) {
        share_out(chunk, i);
        T *x = logits + i * ld, *y = pairs + i * ld;
        const Span near = near_span(chunk, i), more = sink_span(chunk, i);
        V<T> sums{};
        vectors<T>(near, more, [&](int64_t c, Span s) {
            sums = sums + within(load_all(x + c) * load_all(y + c), V<T>{}, c, s.first, s.stop);
        });
        const T total = sum(sums);
        pulled[i * Lq + W - 1] = p[i * Lq + W - 1] * total;
        if (!op.joint) through_softmax(chunk, i, total);
    }

    // The gradients of the scores, in the place of weights; `total`: the mean of <dy, v> over what
    // the softmax is over.
    void through_softmax(int64_t chunk, int64_t i, T total) {
        T *x = logits + i * ld, *y = pairs + i * ld;
        const T share = p[i * Lq + W - 1];
        vectors<T>(near_span(chunk, i), sink_span(chunk, i), [&](int64_t c, Span s) {
            V<T> dx = load_all(x + c) * share * (load_all(y + c) - total);
            if (op.softcap) dx = dx * load_all(slope + i * ld + c);
            store_all(x + c, within(dx, V<T>{}, c, s.first, s.stop));
        });
        clear_around(chunk, i, false, x);
    }

    // Of sources with values v, whose gradients are added to dv; <dy_t, v_s> stand in `products`.
    void backward_run(const LatentRun<T>& run, const T* v, T* dv, const T* products, int64_t ldp) {
        const int64_t begin = run.begin, end = run.end, count = end - begin;
        for (int64_t i = begin; i < end; ++i) {  // <dy_t, v_s> for s <= t alone
            const T* from = products + i * ldp;
            T* to = before + i * TOKENS;
            for (int64_t c = begin / W * W; c < least(TOKENS, i + ROWS + W); c += W) {
                V<T> seen = c <= i ? load_all(from + c) : V<T>{};
                store_all(to + c, within(seen, V<T>{}, c, begin, i + 1));
            }
        }
        transpose(run.before.sum, Dp, L, D, turned, Lp);
        product(delta + begin * Lp, Lp, false, count, Lp, dy + begin * Dp, Dp, int64_t(1), turned,
                Lp, D);
        for (int64_t l = 0; l < Lp; l += W)
            for (int64_t i = begin; i < end; i += ROWS) {
                const int64_t some = least(ROWS, end - i);
                tile(some, delta + i * Lp + l, Lp, true, before + i * TOKENS + begin, TOKENS,
                     int64_t(1), e + begin * Lp + l, Lp, i + some - begin);
            }
        // p d and its part of the logits' gradients, summed from the end: never as a difference of
        // sums, which cancels.
        for (int64_t l = 0; l < Lp; l += W) {
            V<T> later = load_all(scalar + l);
            for (int64_t i = end - 1; i >= begin; --i) {
                V<T> share = load_all(ratio + i * Lp + l), mass = load_all(alpha + i * Lp + l);
                V<T> asked = load_all(delta + i * Lp + l) * share;
                V<T> gone = select(all(T(0)) < mass, asked / mass, mass);
                store(pulled + i * Lq + W + l, asked, Lp - l);
                later = later + gone;
                store_all(lost + i * Lp + l, later);
            }
            store_all(scalar + l, later);
        }
        transpose(reverse, Dp, L, D, turned, Lp);
        product(dkeys + begin * Lp, Lp, false, count, Lp, v + begin * Dp, Dp, int64_t(1), turned,
                Lp, D);
        for (int64_t l = 0; l < Lp; l += W)
            for (int64_t i = begin; i < end; i += ROWS)
                tile(least(ROWS, end - i), dkeys + i * Lp + l, Lp, true, before + i * TOKENS + i,
                     int64_t(1), TOKENS, ratio + i * Lp + l, Lp, end - i);
        for (int64_t i = begin * Lp; i < end * Lp; i += W)
            store_all(dkeys + i, load_all(e + i) * (load_all(dkeys + i) - load_all(lost + i)));
        product(dv + begin * Dp, Dp, true, count, Dp, e + begin * Lp, Lp, int64_t(1), reverse, Dp,
                L);
        product(reverse, Dp, true, L, Dp, ratio + begin * Lp, int64_t(1), Lp, dy + begin * Dp, Dp,
                count);
        if (forgets) backward_decays(run);
    }

    // The gradients of what a run's tokens forget, in the place of that.
    void backward_decays(const LatentRun<T>& run) {
        for (int64_t l = 0; l < L; ++l) own[l] = log_mass_gradient(run.before, l);
        for (int64_t l = 0; l < Lp; l += W) {
            V<T> sum = load_all(own + l);
            for (int64_t i = run.begin; i < run.end; ++i) {
                store_all(decays + i * Lp + l, sum);
                sum = sum + load_all(dkeys + i * Lp + l);
            }
        }
    }

    // Of the log-mass of a state that R and its scalar are relative to.
    T log_mass_gradient(const Latents<T>& at, int64_t l) const {
        V<T> sums{};
        for (int64_t d = 0; d < Dp; d += W)
            sums = sums + load_all(at.sum + l * Dp + d) * load_all(reverse + l * Dp + d);
        return sum(sums) - at.mass[l] * scalar[l];
    }
};

template <class T>
static void every_head(const Attention& op, bool back) {
    const int64_t H = op.heads();
    parallel(op.sequences() * H, 1, [&](int64_t begin, int64_t end) {
        Memory shared;
        std::vector<Head<T>> heads;
        const int64_t most_together =
            op.tokens() < LONG ? 1 : least(TOGETHER, least(H, end - begin));
        heads.reserve(size_t(most_together));
        for (int64_t i = 0; i < most_together; ++i) heads.emplace_back(op, back, shared);
        while (begin < end) {
            const int64_t count = least(most_together, least(end, (begin / H + 1) * H) - begin);
            for (int64_t i = 0; i < count; ++i) {
                Head<T>& head = heads[size_t(i)];
                if (back) head.begin_backward(begin + i);
                else head.begin_forward(begin + i);
                const bool last = i == count - 1;
                head.ahead_head = last ? heads[0].task.h : head.task.h + 1;
                head.ahead_chunks = !last ? 0 : back ? -1 : 1;
            }
            const int64_t chunks = heads[0].chunks();
            for (int64_t c = 0; c < chunks; ++c)
                for (int64_t i = 0; i < count; ++i) {
                    if (back) heads[size_t(i)].backward_chunk(chunks - 1 - c);
                    else heads[size_t(i)].forward_chunk(c);
                }
            for (int64_t i = 0; i < count; ++i) {
                if (back) heads[size_t(i)].end_backward();
                else heads[size_t(i)].end_forward();
            }
            begin += count;
        }
    });
}

static void run_forward(const Attention& op) {
    if (op.v.type() == Type::F64) return every_head<double>(op, false);
    every_head<float>(op, false);
}

static void run_backward(const Attention& op) {
    if (op.v.type() == Type::F64) return every_head<double>(op, true);
    every_head<float>(op, true);
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
    switch (to.type()) {
        case Type::F32: return add_heads_as<float, float>(x, to);
        case Type::F64: return add_heads_as<double, double>(x, to);
        case Type::BF16: return add_heads_as<float, bf16>(x, to);
        case Type::F16: return add_heads_as<float, fp16>(x, to);
    }
}

#endif

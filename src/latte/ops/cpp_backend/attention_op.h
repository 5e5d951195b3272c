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
// With decay, k_s - G_s takes the place of k_s, with G_s = g_1 + ... + g_s from the run's start.
// After the run r becomes r + G, so that no sum is longer than a run. With dA the gradient of the
// log-mass before the run
//
//     dA[l] = <R[l], U[l]> - m sum_t p_t d_t / alpha_t,  dg_t[l] = dA[l] + sum_{s<t} dk_s[l]
//
// Sinks are keys of a sequence that all its queries read, at any distance. They are S more columns
// of the window's logits, after the columns of the chunks. Delayed latents (delay = W) add the
// source t - W at token t. Their runs are the same, over keys and values of other tokens. They
// have separate scores, because they share no column with the window.
//
// With joint, one softmax covers the window's keys and the latents. p is then the softmax over the
// latents' logits and the window's logit plus m_t. m_t is the logsumexp of the logits z_ts of the
// window's keys. The gradients of z_ts are
//
//     dz_ts = p_t[0] w_ts <dy_t, v_s - y_t>,  without joint  p_t[0] w_ts <dy_t, v_s - SWA_t>
//
// Shapes: B batch, T tokens, H heads, G key/value heads, L latents, K key width, D value width,
// W window, P = W - 1 keys of the earlier state, S sinks, N sequences (B, or the packed ones), M
// segments.
#pragma once

#include "attention_plan.h"
#include "torch_abi.h"

namespace latte {

constexpr double REACH = 16.0;  // exp(k - r) is as exact as its argument
// The reach with decay: the past loses weight as fast as new keys gain it.
constexpr double FORGETTING_REACH = 40.0;

// The data that parts of split sequences exchange: P borders, with r rows of keys before each that
// queries after it read. A part owns the border at its beginning, so a first part has none.
struct Borders {
    Tensor forgotten;             // (P,H,L), fp64: a part's total log-decay
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

// Attention with kept tokens: an exact set of keys beside the window, and latents for the rest, in
// one distribution, forward and backward.
//
//     y_t = sum_s p_t(s) v_s + sum_l p_t(l) mu_z[l],   p_t = softmax of scale <q_t, k_s> and of
//     latent_q_t[l] over the keys s of window, sinks and kept tokens, and over the latents l
//     mu_z[l] = sum_r exp(k_r[l]) v_r / sum_r exp(k_r[l])   over what they have read up to block z
//
// Queries are in blocks of C tokens (latte.ops.kept). All queries of a block see the same kept
// keys, sinks and latents, and keys of the window from the same one on. A plan says which these
// are: the kept tokens of each block, and the sources that the latents read before its first query.
//
// A task is one group of key heads of one row, or one head where there are fewer groups than
// threads. Its R heads are processed together, because they share the keys and values of a block,
// which are gathered once. At most QUERIES rows are processed together, so that their weights stay
// in the cache.
//
// The latents' state is (r, m, U): r is the running maximum of the logits, and the sums m and U are
// relative to it. Log-decays are summed from the start of each sequence, in fp64. A source decays
// from the token at which it left the window until the block at which it is read. The backward pass
// begins with the states that are saved at every SEGMENT tokens, and computes everything else
// again. With R and n the gradients of U and m
//
//     dmu_z[l] = sum_t p_t(l) dy_t,   R += dmu_z / m_z,   n -= <dmu_z, mu_z> / m_z
//     dk_r[l] = e_r (<R, v_r> + n),   dv_r = sum_l e_r[l] R[l],   e_r = exp(k_r - r_z)
//
// Shapes: B rows, T tokens, N states (B, or the packed sequences), S slots, Z blocks, H query
// heads, G groups of key heads, L latents, K key width, D value width, M slots of the state before,
// n sinks, J kept places, X segments.
#pragma once

#include "torch_abi.h"

namespace latte {

constexpr int64_t SEGMENT = 256;  // tokens between two states that are saved, in whole blocks
constexpr int64_t QUERIES = 48;   // rows that are processed at once

struct KeptAttention {
    Tensor q, k, v;                           // (B,T,H,K), (B,T,G,K), (B,T,G,D)
    Tensor latent_q, latent_k;                // (B,T,H,L+1), (B,T,H,L)
    Tensor log_mass, mean;                    // (N,H,L), (N,H,L,D)
    Tensor old_k, old_v, old_latent_k;        // (B,M,G,K), (B,M,G,D), (B,M,H,L)
    Tensor sink_q, sink_k, sink_v;            // (B,T,H,K), (N,n,G,K), (N,n,G,D)
    Tensor log_decay, old_log_decay;          // (B,T,H,L), (B,M,H,L), of the sums' dtype
    Tensor sinks_seen;                        // (B,Z,n)
    Tensor source;                            // (B,S): of the M old slots and T tokens, -1 for none
    Tensor kept, kept_there;                  // (B,G,Z,J): places, rows of a table (B,S,G)
    Tensor late, late_there;                  // (B,G,Z,C)
    Tensor begun;                             // (B,G,Z)
    Tensor age, owner, ends;                  // (Z,), (Z,), (N,): of packed sequences
    int64_t window, block, front;             // front: slots before the first block
    double scale, softcap;                    // 0: none
    int64_t sets = 0;                         // of heads, one of which is a task: G, or H
    Tensor out, last_mass, last_mean;         // (B,T,H,D), and as log_mass and mean
    Tensor saved_top, saved_mass, saved_sum;  // (B,X,H,L) fp64, (B,X,H,L), (B,X,H,L,D)
    Tensor dout, dlast_mass, dlast_mean;
    Tensor dq, dk, dv, dlatent_q, dlatent_k, dlog_mass, dmean, dold_k, dold_v, dold_latent_k;
    Tensor dsink_q, dsink_k, dsink_v, dlog_decay, dold_log_decay;

    bool far() const { return bool(latent_k); }
    int64_t batch() const { return q.sizes[0]; }
    int64_t tokens() const { return q.sizes[1]; }
    int64_t heads() const { return q.sizes[2]; }
    int64_t groups() const { return v.sizes[2]; }
    int64_t latents() const { return far() ? latent_k.sizes[3] : 0; }
    int64_t sinks() const { return sink_k ? sink_k.sizes[1] : 0; }
    int64_t old() const { return old_k ? old_k.sizes[1] : 0; }
    int64_t places() const { return kept.sizes[3]; }
    int64_t blocks() const { return kept.sizes[2]; }
    int64_t slots() const { return front + blocks() * block; }
    int64_t states() const { return ends ? ends.sizes[0] : batch(); }
    // A group's heads are faster together, but more threads may want them one by one.
    void divide() {
        const int64_t threads = thread_count(), enough = 4 * threads;
        sets = threads > 1 && batch() * groups() < enough ? heads() : groups();
    }
    // Blocks of a segment, and segments of a row.
    int64_t together() const { return block < SEGMENT ? SEGMENT / block : 1; }
    int64_t segments() const { return (blocks() + together() - 1) / together(); }
};

}  // namespace latte

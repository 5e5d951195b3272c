// Linear maps, norms and networks of a few rows: what dense.cpp and quantised.cpp compute, and
// layer.cpp puts together.
//
// Shapes: R rows of x, all its dimensions but the last, E width of x, M outputs of a map, H heads,
// L latents per head, U hidden units and G key/value heads of the scores.
#pragma once

#include "expect.h"

namespace latte {

inline int64_t width_of(const Tensor& x) { return x.sizes[x.dims - 1]; }
inline int64_t rows_of(const Tensor& x) {
    int64_t rows = 1;
    for (int64_t d = 0; d < x.dims - 1; ++d) rows *= x.sizes[d];
    return rows;
}

// The rows of a step, or of any op that takes rows.
inline void check_rows(const Expect& expect, const Tensor& x) {
    expect(x, "x", FLOATS, x);
    expect.that(x.dims > 0, "x must have at least one dimension");
}

enum class Gate { none, silu, gelu };  // gelu: its approximation by tanh

struct Maps {
    Tensor x, weights[3], outs[3];  // (..., E), (M, E) and (..., M) each
    Tensor residual;                // (..., M) contiguous, which one map is added to
    int64_t count = 0;
    Gate gate = Gate::none;  // if any, one output: that of the first map times the second
};

struct Norm {
    Tensor x, weight, out;           // (..., E), (E,), (..., E)
    double eps = 0.0, offset = 0.0;  // added to the weight
};

// What a token's hidden state says about the latents: logits, and the score of a kept token.
//
//     q = Q x + b in column 0,  k = K x,  r = D gelu(U x / sqrt(mean(x^2) + eps) + u) + d
//
// All weights have one dtype, to which x is cast.
struct Latents {
    Tensor x, weights[2], bias;           // (R, E); (H (L or L+1), E), (H L, E); (H,)
    Tensor up, up_bias, down, down_bias;  // (U, E), (U,), (G, U), (G,)
    int64_t heads = 1;
    double eps = 0.0;
    Tensor outs[2], hidden, score;  // (R, H, ...) each, (R, U), (R, G) in 11 bits
};

struct Integers {
    Tensor weight, scales;  // uint8 (16 P, K / 2) and (G, N, 2), or int8 (16 P, K) and (G, N)
    bool four() const { return scales.dims == 3; }
    int64_t outputs() const { return scales.sizes[1]; }
    int64_t panels() const { return (outputs() + 15) / 16; }
    int64_t inputs() const { return weight.sizes[1] * (four() ? 2 : 1); }
};

struct Products {
    Tensor x, outs[3], residual;  // (..., K), (..., N) each, (..., N) contiguous
    Integers maps[3];
    int64_t count = 0;
    // For a feed-forward network, whose maps are gate, up and down.
    Tensor norm;  // (K,)
    double eps = 0.0, offset = 0.0;
    Gate gate = Gate::none;
    bool adds = false;  // x to the output
};

// Each checks its inputs and makes the outputs that are not there; then it may run.
void check_maps(const Expect& expect, Maps& op, std::initializer_list<const char*> names);
void check_norm(const Expect& expect, Norm& op, const char* name = "norm");
void check_latents(const Expect& expect, Latents& op);
void check_products(const Expect& expect, Products& op);
void check_network(const Expect& expect, Products& op);
void run(Maps& op);
void run(Norm& op);
void run(Latents& op);
void run(Products& op);
void run_network(Products& op);

// The op cpu_kept_step.
void take_kept_step(StableIValue* arguments, uint64_t, uint64_t);

}  // namespace latte

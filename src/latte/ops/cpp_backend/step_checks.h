// Checks that steps of decoding share.
#pragma once

#include "expect.h"

namespace latte {

// Tables that rotate queries and keys of width K, (B or 1, 1, 1 or 2, at most K/2).
inline void check_angles(const Expect& expect, const Tensor& v, int64_t K, const Tensor& cos,
                         const Tensor& sin) {
    expect.together({&cos, &sin}, "cosines and sines");
    if (!cos) return;
    const int64_t rows = cos.dims && cos.sizes[0] == 1 ? 1 : v.sizes[0];
    expect(cos, "cos", wide(v), {rows, 1, ANY, ANY});
    const int64_t others = sin.dims && sin.sizes[0] == 1 ? 1 : rows;
    expect(sin, "sin", wide(v), {others, 1, ANY, cos.sizes[3]});
    expect.that(cos.sizes[2] >= 1 && sin.sizes[2] >= 1, "angles must have at least one row");
    expect.that(2 * cos.sizes[3] <= K, "angles must be for the width of the keys");
}

}  // namespace latte

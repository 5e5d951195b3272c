// The ops of training between the matrix products: SwiGLU's product, the RMSNorm and the rotation
// of queries and keys. Each op reads its inputs once forward and once backward.
//
//     silu(g) u:   s = sigmoid(g),  du = dy g s,  dg = dy u s (1 + g (1 - s))
//     w x s:       s = 1 / sqrt(mean(x^2) + eps),  dx = s (w dy - x s^2 mean(w dy x))
//                  dw = sum dy x s
//     rotation:    (a, b) -> (a cos - b sin, b cos + a sin), back by the negative angle
//
// All tensors are contiguous. Each run of ROWS rows has its own sums over rows. These are added in
// order, for any number of threads.
//
// Shapes: R rows, all dimensions but the last, E width; B batch, T tokens, H heads, K width of a
// head.
#ifndef LATTE_POINTWISE
#define LATTE_POINTWISE

#include "expect.h"
#include "torch_abi.h"

namespace latte {

constexpr int64_t ROWS = 64;
constexpr int64_t ELEMENTS = 8192;  // the fewest for which another thread saves time

struct Glu {
    Tensor gate, up, out, dout, dgate, dup;  // alike
};

struct NormRows {
    Tensor x, weight, scale, out, dout, dx;  // (..., E), (E,), (..., 1), (..., E) x 3
    double eps = 0.0;
    std::vector<double> sums;  // (runs, E): of dw

    int64_t width() const { return weight.sizes[0]; }
    int64_t rows() const { return count_of(scale); }
    int64_t runs() const { return (rows() + ROWS - 1) / ROWS; }
};

struct Rotation {
    Tensor x, cos, sin, out;  // (B,T,H,K), (B or 1,T,1,K/2) x 2, (B,T,H,K)
    double sign = 1.0;
};

}  // namespace latte

#define LATTE_FILE "pointwise.cpp"
#include "each_isa.h"

namespace latte {

static Tensor like(const Tensor& x) { return Tensor::empty(x.sizes, x.dims, x.dtype); }

static void check_glu(const Expect& expect, const Glu& op) {
    expect(op.gate, "gate", FLOATS, op.gate, Layout::contiguous);
    expect(op.up, "up", op.gate.dtype, op.gate, Layout::contiguous);
    expect(op.dout, "dy", op.gate.dtype, op.gate, Layout::contiguous);
}

// (gate, up) -> silu(gate) up
static void glu(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Glu op;
    op.gate = stack.tensor(), op.up = stack.tensor();
    check_glu(Expect("cpu_glu"), op);
    op.out = like(op.gate);
    LATTE_CHOOSE(run_glu)(op);
    stack.give(op.out);
}

// (dy, gate, up) -> their gradients
static void glu_backward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Glu op;
    op.dout = stack.tensor(), op.gate = stack.tensor(), op.up = stack.tensor();
    check_glu(Expect("cpu_glu_backward"), op);
    op.dgate = like(op.gate), op.dup = like(op.up);
    LATTE_CHOOSE(run_glu)(op);
    stack.give(op.dgate, op.dup);
}

static void check_norm(const Expect& expect, const NormRows& op) {
    expect(op.x, "x", FLOATS, op.x, Layout::contiguous);
    expect.that(op.x.type() == Type::F32 || op.x.type() == Type::F64,
                "x must be float32 or float64");
    expect.that(op.x.dims > 0, "x must have at least one dimension");
    expect(op.weight, "weight", op.x.dtype, {op.x.sizes[op.x.dims - 1]}, Layout::contiguous);
    expect(op.dout, "dy", op.x.dtype, op.x, Layout::contiguous);
}

// (x, weight, eps) -> (y, scale)
static void norm(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    NormRows op;
    op.x = stack.tensor(), op.weight = stack.tensor(), op.eps = stack.number();
    check_norm(Expect("cpu_norm_rows"), op);
    op.scale = Tensor::like(op.x, 1), op.out = like(op.x);
    LATTE_CHOOSE(run_norm)(op);
    stack.give(op.out, op.scale);
}

// (dy, x, weight, scale) -> gradients of x and weight
static void norm_backward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    NormRows op;
    op.dout = stack.tensor(), op.x = stack.tensor(), op.weight = stack.tensor();
    op.scale = stack.tensor();
    const Expect expect("cpu_norm_rows_backward");
    check_norm(expect, op);
    std::vector<int64_t> rows(op.x.sizes, op.x.sizes + op.x.dims);
    rows.back() = 1;
    expect(op.scale, "scale", op.x.dtype, rows, Layout::contiguous);
    op.dx = like(op.x);
    op.sums.assign(size_t(op.runs() * op.width()), 0.0);
    LATTE_CHOOSE(run_norm)(op);
    Tensor dweight = like(op.weight);
    for (int64_t e = 0; e < op.width(); ++e) {
        double sum = 0.0;
        for (int64_t run = 0; run < op.runs(); ++run) sum += op.sums[size_t(run * op.width() + e)];
        if (op.x.type() == Type::F64) dweight.at<double>()[e] = sum;
        else dweight.at<float>()[e] = float(sum);
    }
    stack.give(op.dx, dweight);
}

// (x, cos, sin, sign) -> x turned
static void rotate(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Rotation op;
    op.x = stack.tensor(), op.cos = stack.tensor(), op.sin = stack.tensor();
    op.sign = stack.number();
    const Expect expect("cpu_rotate");
    expect(op.x, "x", FLOATS, {ANY, ANY, ANY, ANY}, Layout::contiguous);
    const int64_t B = op.x.sizes[0], T = op.x.sizes[1], K = op.x.sizes[3];
    expect.that(K % 2 == 0, "heads of x must have an even width");
    expect(op.cos, "cos", wide(op.x), {op.cos.dims && op.cos.sizes[0] == 1 ? 1 : B, T, 1, K / 2},
           Layout::contiguous);
    expect(op.sin, "sin", wide(op.x), op.cos, Layout::contiguous);
    op.out = like(op.x);
    LATTE_CHOOSE(run_rotation)(op);
    stack.give(op.out);
}

static Register registered_glu("cpu_glu", glu);
static Register registered_glu_backward("cpu_glu_backward", glu_backward);
static Register registered_norm("cpu_norm_rows", norm);
static Register registered_norm_backward("cpu_norm_rows_backward", norm_backward);
static Register registered_rotate("cpu_rotate", rotate);

}  // namespace latte

#else  // once per instruction set

#include "rows.h"

template <class S>
static void apply_glu(Glu& op) {
    using T = typename Computed<S>::type;
    constexpr int64_t W = width<T>;
    const int64_t count = count_of(op.gate);
    const S *gate = op.gate.at<S>(), *up = op.up.at<S>(), *dout = op.dout.at<S>();
    S *out = op.out.at<S>(), *dgate = op.dgate.at<S>(), *dup = op.dup.at<S>();
    parallel((count + W - 1) / W, ELEMENTS / W, [&](int64_t begin, int64_t end) {
        for (int64_t c = begin * W; c < end * W; c += W) {
            const int64_t left = count - c;
            V<T> g = load(gate + c, 1, left), u = load(up + c, 1, left), s = silu_factor(g);
            if (out) {
                store(out + c, g * s * u, left);
                continue;
            }
            V<T> dy = load(dout + c, 1, left);
            store(dup + c, dy * (g * s), left);
            store(dgate + c, dy * u * s * (g * (T(1) - s) + T(1)), left);
        }
    });
}

template <class T>
static void norm_row_backward(const T* x, const T* weight, const T* dout, T scale, int64_t E, T* dx,
                              double* sums) {
    V<T> along{};
    for (int64_t c = 0; c < E; c += width<T>) {
        const int64_t left = E - c;
        along = along + load(weight + c, 1, left) * load(dout + c, 1, left) * load(x + c, 1, left);
    }
    const T pulled = sum(along) / T(E) * scale * scale;
    for (int64_t c = 0; c < E; c += width<T>) {
        const int64_t left = E - c;
        V<T> dy = load(dout + c, 1, left), at = load(x + c, 1, left);
        store(dx + c, (load(weight + c, 1, left) * dy - at * pulled) * scale, left);
        T added[width<T>];
        store_all(added, dy * at * scale);
        for (int64_t j = 0; j < width<T> && j < left; ++j) sums[c + j] += double(added[j]);
    }
}

template <class T>
static void apply_norm(NormRows& op) {
    const int64_t E = op.width(), rows = op.rows();
    const T *x = op.x.at<T>(), *weight = op.weight.at<T>(), *dout = op.dout.at<T>();
    T *out = op.out.at<T>(), *dx = op.dx.at<T>(), *scale = op.scale.at<T>();
    parallel(op.runs(), 1 + ELEMENTS / (1 + E * ROWS), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin * ROWS; r < end * ROWS && r < rows; ++r) {
            if (out) {
                const int64_t at = r * E;
                scale[r] = norm_row(x + at, weight, 1, T(op.eps), T(0), E, out + at);
            } else
                norm_row_backward(x + r * E, weight, dout + r * E, scale[r], E, dx + r * E,
                                  op.sums.data() + r / ROWS * E);
        }
    });
}

template <class S>
static void apply_rotation(Rotation& op) {
    using T = typename Computed<S>::type;
    const int64_t tokens = op.x.sizes[1], H = op.x.sizes[2], K = op.x.sizes[3], half = K / 2;
    const T sign = T(op.sign);
    parallel(op.x.sizes[0] * tokens, 1 + ELEMENTS / (1 + H * K), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const int64_t angle = op.cos.sizes[0] == 1 ? row % tokens : row;
            const T *cos = op.cos.at<T>() + angle * half, *sin = op.sin.at<T>() + angle * half;
            const S* x = op.x.at<S>() + row * H * K;
            S* out = op.out.at<S>() + row * H * K;
            for (int64_t c = 0; c < half; c += width<T>) {
                const int64_t left = half - c;
                V<T> u = load(cos + c, 1, left), v = load(sin + c, 1, left) * sign;
                for (int64_t h = 0; h < H; ++h) {
                    const int64_t at = h * K + c;
                    V<T> a = load(x + at, 1, left), b = load(x + at + half, 1, left);
                    store(out + at, a * u - b * v, left);
                    store(out + at + half, b * u + a * v, left);
                }
            }
        }
    });
}

static void run_rotation(Rotation& op) {
    by_dtype(op.x.type(), [&](auto s) { apply_rotation<decltype(s)>(op); });
}

static void run_glu(Glu& op) {
    by_dtype(op.gate.type(), [&](auto s) { apply_glu<decltype(s)>(op); });
}

static void run_norm(NormRows& op) {
    if (op.x.type() == Type::F64) return apply_norm<double>(op);
    return apply_norm<float>(op);
}

#endif

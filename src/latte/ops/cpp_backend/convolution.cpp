// The causal depthwise convolution, y_t = bias + sum_i weight[:, i] x_{t-K+1+i}, and its gradients.
//
// A line is a sequence after its tail of K-1 earlier inputs. Each output is a sum over K neighbours
// in the line. The sum always has the same order, so that a sequence in several parts gives the
// same bits as in one part. A task is a run of ROWS tokens. Each run has its own sums of the
// weights' gradients, and these are added in order for any number of threads.
//
// Shapes: B batch, T tokens, E channels, K taps, N sequences (B, or the packed ones).
#ifndef LATTE_CONVOLUTION
#define LATTE_CONVOLUTION

#include "expect.h"
#include "torch_abi.h"

namespace latte {

constexpr int64_t ROWS = 256;
constexpr int64_t FEW = 32;  // rows whose gradients are summed in the inputs' precision

struct Convolution {
    Tensor x, weight, bias;            // (B,T,E), (E,K), (E,)
    Tensor initial, mask, bounds;      // (N,K-1,E), (B,T), (N+1,) int64
    Tensor out, tail;                  // (B,T,E), (N,K-1,E)
    Tensor dout, dtail, dx, dinitial;  // of the backward pass
    std::vector<double> taps;          // (K+1,E): weights, then the bias
    std::vector<double> sums;          // (runs,K+1,E): their gradients

    int64_t tokens() const { return x.sizes[1]; }
    int64_t channels() const { return x.sizes[2]; }
    int64_t width() const { return weight.sizes[1]; }
    int64_t sequences() const { return bounds ? bounds.sizes[0] - 1 : x.sizes[0]; }
    int64_t rows() const { return x.sizes[0] * x.sizes[1]; }
    int64_t runs() const { return (rows() + ROWS - 1) / ROWS; }
};

// One sequence: its first row of all (B*T) rows, and how many there are.
struct Line {
    int64_t n, begin, count;

    Line(const Convolution& op, int64_t number)
        : n(number), begin(n * op.tokens()), count(op.tokens()) {
        if (!op.bounds) return;
        const int64_t* bounds = op.bounds.at<int64_t>();
        begin = bounds[n], count = bounds[n + 1] - begin;
    }
    static Line at_row(const Convolution& op, int64_t row) {
        int64_t n = op.bounds ? 0 : row / op.tokens();
        if (op.bounds)
            for (int64_t stop = op.sequences(); stop - n > 1;) {
                const int64_t middle = (n + stop) / 2;
                (op.bounds.at<int64_t>()[middle] <= row ? n : stop) = middle;
            }
        return Line(op, n);
    }
};

}  // namespace latte

#define LATTE_FILE "convolution.cpp"
#include "each_isa.h"

namespace latte {

static Convolution inputs(Stack& stack) {
    Convolution op;
    op.x = stack.tensor(), op.weight = stack.tensor(), op.bias = stack.maybe_tensor();
    op.initial = stack.maybe_tensor(), op.mask = stack.maybe_tensor();
    op.bounds = stack.maybe_tensor();
    return op;
}

static void check_inputs(const Expect& expect, const Convolution& op) {
    expect(op.x, "x", FLOATS, {ANY, ANY, ANY});
    const int64_t E = op.channels();
    expect(op.weight, "weight", wide(op.x), {E, ANY}), expect(op.bias, "bias", wide(op.x), {E});
    expect.that(op.width() >= 1, "weight must have at least one tap");
    expect.sequences(op.x, op.mask, op.bounds);
    expect(op.initial, "initial", op.x.dtype, {op.sequences(), op.width() - 1, E});
}

static void widen_taps(Convolution& op) {
    const int64_t E = op.channels(), K = op.width();
    auto number = [](const Tensor& x, int64_t at) {
        return x.type() == Type::F64 ? x.at<double>()[at] : double(x.at<float>()[at]);
    };
    op.taps.assign(size_t((K + 1) * E), 0.0);
    for (int64_t e = 0; e < E; ++e) {
        for (int64_t i = 0; i < K; ++i)
            op.taps[size_t(i * E + e)] =
                number(op.weight, e * op.weight.strides[0] + i * op.weight.strides[1]);
        if (op.bias) op.taps[size_t(K * E + e)] = number(op.bias, e * op.bias.strides[0]);
    }
}

// (x, weight, bias?, initial?, mask?, bounds?) -> (y, tail)
static void forward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Convolution op = inputs(stack);
    check_inputs(Expect("cpu_convolution"), op);
    widen_taps(op);
    op.out = Tensor::empty({op.x.sizes[0], op.tokens(), op.channels()}, op.x.dtype);
    op.tail = Tensor::empty({op.sequences(), op.width() - 1, op.channels()}, op.x.dtype);
    LATTE_CHOOSE(run_forward)(op);
    stack.give(op.out, op.tail);
}

// (dy, dtail, the inputs) -> gradients of x, weight, bias and initial (or empty)
static void backward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor dout = stack.tensor(), dtail = stack.tensor();
    Convolution op = inputs(stack);
    op.dout = static_cast<Tensor&&>(dout), op.dtail = static_cast<Tensor&&>(dtail);
    const Expect expect("cpu_convolution_backward");
    check_inputs(expect, op);
    const int64_t E = op.channels(), K = op.width(), N = op.sequences();
    expect(op.dout, "grad of y", op.x.dtype, op.x);
    expect(op.dtail, "grad of tail", op.x.dtype, {N, K - 1, E});
    widen_taps(op);
    op.dx = Tensor::empty({op.x.sizes[0], op.tokens(), E}, op.x.dtype);
    Tensor dweight = Tensor::empty({E, K}, op.weight.dtype);
    Tensor dbias = op.bias ? Tensor::empty({E}, op.bias.dtype) : Tensor::empty({0}, wide(op.x));
    op.dinitial =
        op.initial ? Tensor::empty({N, K - 1, E}, op.x.dtype) : Tensor::empty({0}, op.x.dtype);
    op.sums.assign(size_t(op.runs() * (K + 1) * E), 0.0);
    LATTE_CHOOSE(run_backward)(op);
    auto put = [](Tensor& x, int64_t at, double value) {
        if (x.type() == Type::F64) x.at<double>()[at] = value;
        else x.at<float>()[at] = float(value);
    };
    for (int64_t i = 0; i <= K; ++i)
        for (int64_t e = 0; e < E; ++e) {
            double sum = 0.0;
            for (int64_t run = 0; run < op.runs(); ++run)
                sum += op.sums[size_t((run * (K + 1) + i) * E + e)];
            if (i < K) put(dweight, e * K + i, sum);
            else if (op.bias) put(dbias, e, sum);
        }
    stack.give(op.dx, dweight, dbias, op.dinitial);
}

// (x, weight, bias?, tail!, real?) -> y: one token (B, E), its tail moved on
static void step(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Convolution op;
    op.x = stack.tensor(), op.weight = stack.tensor(), op.bias = stack.maybe_tensor();
    op.tail = stack.tensor(true), op.mask = stack.maybe_tensor();
    const Expect expect("cpu_convolution_step");
    expect(op.x, "x", FLOATS, {ANY, ANY});
    const int64_t B = op.x.sizes[0], E = op.x.sizes[1];
    expect(op.weight, "weight", FLOATS, {E, ANY}), expect(op.bias, "bias", FLOATS, {E});
    expect.that(op.width() >= 1, "weight must have at least one tap");
    expect(op.tail, "tail", op.x.dtype, {B, op.width() - 1, E});
    expect(op.mask, "real", aoti_torch_dtype_bool(), {B});
    op.out = Tensor::empty({op.x.sizes[0], op.x.sizes[1]}, op.x.dtype);
    LATTE_CHOOSE(run_step)(op);
    stack.give(op.out);
}

static Register registered_step("cpu_convolution_step", step);
static Register registered_forward("cpu_convolution", forward);
static Register registered_backward("cpu_convolution_backward", backward);

}  // namespace latte

#else  // once per instruction set

#include "rows.h"

// Elements m = 0 ... of a line's inputs, tail first; null where it is masked, or there is no tail.
template <class S>
static const S* element(const Convolution& op, const Line& line, int64_t m, int64_t& stride) {
    const int64_t P = op.width() - 1, T = op.tokens();
    if (m < P) {
        stride = op.initial ? op.initial.strides[2] : 1;
        if (!op.initial) return nullptr;
        return op.initial.at<S>() + line.n * op.initial.strides[0] + m * op.initial.strides[1];
    }
    const int64_t row = line.begin + m - P;
    stride = op.x.strides[2];
    if (op.mask && !op.mask.at<bool>()[row]) return nullptr;
    return op.x.at<S>() + row / T * op.x.strides[0] + row % T * op.x.strides[1];
}

template <class T>
static std::vector<T> narrow_taps(const Convolution& op) {
    return std::vector<T>(op.taps.begin(), op.taps.end());
}

template <class S>
struct Run {
    using T = typename Computed<S>::type;
    std::vector<const S*> x;  // of the row's taps
    std::vector<int64_t> stride;
    explicit Run(int64_t K) : x(size_t(K)), stride(size_t(K)) {}
};

// The number of rows of one line that are read together. Each element is read and widened once for
// all of them, and the taps stay in registers.
constexpr int64_t TOGETHER = 8;

// TOGETHER rows, whose first reads x[0], x[row], ..., x[(K-1) row]: neighbours, all real. The sums
// are in the order of `forward_rows`.
template <class S, int K>
static void forward_together(const S* x, int64_t row, int64_t E,
                             const typename Computed<S>::type* taps, S* out) {
    using T = typename Computed<S>::type;
    for (int64_t c = 0; c < E; c += width<T>) {
        const int64_t left = E - c;
        V<T> tap[K], seen[K];
        for (int i = 0; i < K; ++i) tap[i] = load(taps + i * E + c, 1, left);
        const V<T> bias = load(taps + K * E + c, 1, left);
        for (int i = 0; i < K - 1; ++i) seen[i] = load(x + i * row + c, 1, left);
#pragma GCC unroll 8
        for (int64_t t = 0; t < TOGETHER; ++t) {
            seen[K - 1] = load(x + (t + K - 1) * row + c, 1, left);
            V<T> sum = bias;
            for (int i = 0; i < K; ++i) sum = sum + tap[i] * seen[i];
            store(out + t * E + c, sum, left);
            for (int i = 0; i < K - 1; ++i) seen[i] = seen[i + 1];
        }
    }
}

// Whether TOGETHER rows from `row` on can be read together: all that they read is in x and real.
static bool together(const Convolution& op, const Line& line, int64_t row, int64_t end) {
    const int64_t K = op.width(), T = op.tokens();
    const int64_t stop = end < line.begin + line.count ? end : line.begin + line.count;
    if (row + TOGETHER > stop || row - line.begin < K - 1 || K < 2 || K > 4) return false;
    if (op.x.strides[2] != 1 || row % T < K - 1) return false;
    for (int64_t t = row - K + 1; op.mask && t < row + TOGETHER; ++t)
        if (!op.mask.at<bool>()[t]) return false;
    return true;
}

template <class S>
static void forward_rows(Convolution& op, int64_t begin, int64_t end, const void* given) {
    using T = typename Computed<S>::type;
    const int64_t E = op.channels(), K = op.width();
    const T* taps = static_cast<const T*>(given);
    Run<S> run(K);
    Line line = Line::at_row(op, begin);
    for (int64_t row = begin; row < end; ++row) {
        while (row >= line.begin + line.count) line = Line(op, line.n + 1);
        if (together(op, line, row, end)) {
            int64_t stride;
            const S* x = element<S>(op, line, row - line.begin, stride);
            S* out = op.out.at<S>() + row * E;
            const int64_t next = op.x.strides[1];
            if (K == 2) forward_together<S, 2>(x, next, E, taps, out);
            else if (K == 3) forward_together<S, 3>(x, next, E, taps, out);
            else forward_together<S, 4>(x, next, E, taps, out);
            row += TOGETHER - 1;
            continue;
        }
        for (int64_t i = 0; i < K; ++i)
            run.x[i] = element<S>(op, line, row - line.begin + i, run.stride[i]);
        S* out = op.out.at<S>() + row * E;
        for (int64_t c = 0; c < E; c += width<T>) {
            const int64_t left = E - c;
            V<T> sum = load(taps + K * E + c, 1, left);
            for (int64_t i = 0; i < K; ++i)
                if (run.x[i])
                    sum = sum + load(taps + i * E + c, 1, left) *
                                    load(run.x[i] + c * run.stride[i], run.stride[i], left);
            store(out + c, sum, left);
        }
    }
}

// The last K-1 inputs of a sequence.
template <class S>
static void end_of_line(Convolution& op, int64_t n) {
    const int64_t E = op.channels(), P = op.width() - 1;
    const Line line(op, n);
    for (int64_t p = 0; p < P; ++p) {
        int64_t stride;
        const S* from = element<S>(op, line, line.count + p, stride);
        S* to = op.tail.at<S>() + (n * P + p) * E;
        for (int64_t e = 0; e < E; ++e) to[e] = from ? from[e * stride] : S{};
    }
}

// Gradient of element m of a line: through the outputs that read it, and through the new tail.
template <class S, class T>
static void element_gradient(const Convolution& op, const Line& line, int64_t m, const T* taps,
                             S* to) {
    const int64_t E = op.channels(), K = op.width(), tokens = op.tokens();
    const int64_t stride = op.dout.strides[2], tail_stride = op.dtail.strides[2];
    const S* tail = nullptr;
    if (m >= line.count)
        tail = op.dtail.at<S>() + line.n * op.dtail.strides[0] +
               (m - line.count) * op.dtail.strides[1];
    for (int64_t c = 0; c < E; c += width<T>) {
        const int64_t left = E - c;
        V<T> sum{};
        if (tail) sum = load(tail + c * tail_stride, tail_stride, left);
        for (int64_t i = 0; i < K; ++i) {
            const int64_t t = m - i;
            if (t < 0 || t >= line.count) continue;
            const int64_t row = line.begin + t;
            const S* dout = op.dout.at<S>() + row / tokens * op.dout.strides[0] +
                            row % tokens * op.dout.strides[1];
            sum = sum + load(taps + i * E + c, 1, left) * load(dout + c * stride, stride, left);
        }
        store(to + c, sum, left);
    }
}

template <class S>
static void backward_rows(Convolution& op, int64_t begin, int64_t end, const void* given,
                          double* sums) {
    using T = typename Computed<S>::type;
    const int64_t E = op.channels(), K = op.width(), tokens = op.tokens();
    const T* taps = static_cast<const T*>(given);
    std::vector<T> added(size_t((K + 1) * E));
    Run<S> run(K);
    Line line = Line::at_row(op, begin);
    const int64_t stride = op.dout.strides[2];
    for (int64_t row = begin; row < end; ++row) {
        while (row >= line.begin + line.count) line = Line(op, line.n + 1);
        S* dx = op.dx.at<S>() + row * E;
        if (op.mask && !op.mask.at<bool>()[row]) std::memset(dx, 0, size_t(E) * sizeof(S));
        else element_gradient<S, T>(op, line, row - line.begin + K - 1, taps, dx);
        for (int64_t i = 0; i < K; ++i)
            run.x[i] = element<S>(op, line, row - line.begin + i, run.stride[i]);
        const S* dout =
            op.dout.at<S>() + row / tokens * op.dout.strides[0] + row % tokens * op.dout.strides[1];
        for (int64_t c = 0; c < E; c += width<T>) {
            const int64_t left = E - c;
            V<T> dy = load(dout + c * stride, stride, left);
            for (int64_t i = 0; i < K; ++i)
                if (run.x[i]) {
                    T* sum = added.data() + i * E + c;
                    V<T> x = load(run.x[i] + c * run.stride[i], run.stride[i], left);
                    store(sum, load(sum, 1, left) + dy * x, left);
                }
            T* sum = added.data() + K * E + c;
            store(sum, load(sum, 1, left) + dy, left);
        }
        if ((row + 1) % FEW && row + 1 < end) continue;
        for (size_t j = 0; j < added.size(); ++j) sums[j] += double(added[j]), added[j] = T(0);
    }
}

template <class S>
static void forward_all(Convolution& op) {
    using T = typename Computed<S>::type;
    const std::vector<T> taps = narrow_taps<T>(op);
    parallel(op.rows(), 64,
             [&](int64_t begin, int64_t end) { forward_rows<S>(op, begin, end, taps.data()); });
    for (int64_t n = 0; n < op.sequences(); ++n) end_of_line<S>(op, n);
}

template <class S>
static void backward_all(Convolution& op) {
    using T = typename Computed<S>::type;
    const std::vector<T> taps = narrow_taps<T>(op);
    const int64_t E = op.channels(), K = op.width();
    parallel(op.runs(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t run = begin; run < end; ++run) {
            const int64_t last = (run + 1) * ROWS < op.rows() ? (run + 1) * ROWS : op.rows();
            backward_rows<S>(op, run * ROWS, last, taps.data(), op.sums.data() + run * (K + 1) * E);
        }
    });
    for (int64_t n = 0; op.initial && n < op.sequences(); ++n)
        for (int64_t p = 0; p < K - 1; ++p)
            element_gradient<S, T>(op, Line(op, n), p, taps.data(),
                                   op.dinitial.at<S>() + (n * (K - 1) + p) * E);
}

template <class S>
static void take_step(Convolution& op) {
    using T = typename Computed<S>::type;
    const int64_t B = op.x.sizes[0], E = op.x.sizes[1], K = op.width();
    std::vector<T> taps(size_t((K + 1) * E));  // those of a tap next to each other, then the bias
    for (int64_t i = 0; i < K; ++i)
        gather(op.weight, i * op.weight.strides[1], op.weight.strides[0], E, taps.data() + i * E);
    if (op.bias) gather(op.bias, 0, op.bias.strides[0], E, taps.data() + K * E);
    const int64_t of_x = op.x.strides[1], of_tail = op.tail.strides[2], next = op.tail.strides[1];
    for (int64_t b = 0; b < B; ++b) {
        const bool real = !op.mask || op.mask.at<bool>()[b * op.mask.strides[0]];
        const S* x = op.x.at<S>() + b * op.x.strides[0];
        S *tail = op.tail.at<S>() + b * op.tail.strides[0], *out = op.out.at<S>() + b * E;
        for (int64_t c = 0; c < E; c += width<T>) {
            const int64_t left = E - c < width<T> ? E - c : width<T>;
            V<T> sum = load(taps.data() + K * E + c, 1, left);
            for (int64_t i = 0; i < K; ++i) {
                const S* held = i < K - 1 ? tail + i * next + c * of_tail : x + c * of_x;
                const int64_t stride = i < K - 1 ? of_tail : of_x;
                const bool none = i == K - 1 && !real;
                const V<T> now = none ? V<T>{} : load(held, stride, left);
                sum = sum + load(taps.data() + i * E + c, 1, left) * now;
                if (!i) continue;  // the oldest input leaves the tail
                S* before = tail + (i - 1) * next + c * of_tail;
                for (int64_t j = 0; j < left; ++j)
                    before[j * of_tail] = none ? S{} : held[j * stride];
            }
            store(out + c, sum, left);
        }
    }
}

static void run_step(Convolution& op) {
    by_dtype(op.x.type(), [&](auto s) { take_step<decltype(s)>(op); });
}

static void run_forward(Convolution& op) {
    by_dtype(op.x.type(), [&](auto s) { forward_all<decltype(s)>(op); });
}

static void run_backward(Convolution& op) {
    by_dtype(op.x.type(), [&](auto s) { backward_all<decltype(s)>(op); });
}

#endif

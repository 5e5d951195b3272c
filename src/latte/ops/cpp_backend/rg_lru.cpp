// The RG-LRU, fused from the gates on: one walk over each sequence forward, one backward.
//
//     r, i = sigmoid(recurrence gate), sigmoid(input gate),  log a_t = -8 r_t softplus(theta)
//     h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t
//     g_t = dh_t + a_{t+1} g_{t+1}                       the gradient that reaches h_t
//     dlog a_t = g_t (a_t h_{t-1} - i_t x_t a_t^2 / sqrt(1 - a_t^2))
//
// A task is one sequence and a block of channels, and processes one token after the other. Each
// input is read once, and only the results are written. A sequence in several parts gives the same
// bits as in one part. The backward walk reads h_{t-1} from the output, and computes the gates
// again from their logits. At the start of a sequence a = 0 and the factor is 1. A masked token
// does not change the state.
//
// Shapes: B batch, T tokens, E channels, N sequences (B, or the packed ones).
#ifndef LATTE_RG_LRU
#define LATTE_RG_LRU

#include "expect.h"
#include "torch_abi.h"

namespace latte {

constexpr int64_t CHUNK = 32;    // tokens of which dtheta is summed in the dtype of the state
constexpr int64_t BLOCK = 2048;  // channels of a task at most
constexpr int64_t AHEAD = 8;     // memory is prefetched this many tokens before it is read

struct RgLru {
    Tensor x, r, i, theta, initial, mask, bounds;  // (B,T,E) x 3, (E,), (N,E), (B,T), (N+1,) int64
    bool reverse;
    Tensor out, last;                          // (B,T,E), (N,E)
    Tensor dout, dlast, dx, dr, di, dinitial;  // of the backward pass
    std::vector<double> slopes;                // (N,E): dtheta of each sequence

    int64_t tokens() const { return x.sizes[1]; }
    int64_t channels() const { return x.sizes[2]; }
    int64_t sequences() const { return bounds ? bounds.sizes[0] - 1 : x.sizes[0]; }
};

// The place of sequence n, and the order in which its tokens are processed.
struct Walk {
    int64_t row, begin, count;
    bool reverse;
    const bool* mask;

    Walk(const RgLru& op, int64_t n) : row(n), begin(0), count(op.tokens()), reverse(op.reverse) {
        if (op.bounds) {
            const int64_t* bounds = op.bounds.at<int64_t>();
            row = 0, begin = bounds[n], count = bounds[n + 1] - begin;
        }
        mask = op.mask ? op.mask.at<bool>() + row * op.tokens() : nullptr;
    }
    // The token of a step; beyond the sequence's ends that of its last or first one.
    int64_t token(int64_t step) const {
        step = step < 0 ? 0 : step < count ? step : count - 1;
        return reverse ? begin + count - 1 - step : begin + step;
    }
    bool real(int64_t step) const { return !mask || mask[token(step)]; }
    // The step at which the sequence starts: -1 if it continues from a state that is not all 0.
    template <class T>
    int64_t start(const RgLru& op, int64_t n) const {
        const int64_t E = op.channels();
        for (int64_t e = 0; op.initial && e < E; ++e)
            if (op.initial.at<T>()[n * E + e] != T(0)) return -1;
        int64_t step = 0;
        while (step < count && !real(step)) ++step;
        return step;
    }
};

template <void (*pass)(RgLru&, int64_t, int64_t, int64_t)>
void every_sequence(RgLru& op) {
    const int64_t N = op.sequences(), E = op.channels(), threads = thread_count();
    if (!N || !E) return;
    std::vector<std::pair<int64_t, int64_t>> longest(static_cast<size_t>(N));  // tokens, sequence
    int64_t total = 0;
    for (int64_t n = 0; n < N; ++n) {
        const int64_t count = Walk(op, n).count;
        longest[size_t(n)] = {-count, n}, total += count;
    }
    std::sort(longest.begin(), longest.end());
    // Wide blocks read memory best. Narrower ones, of whole cache lines, if the longest sequence is
    // more than a thread's share of all.
    const int64_t most = -longest[0].first, share = total > 0 ? total : 1;
    const int64_t narrowest = (E + 31) / 32, wanted = (threads * most + share - 1) / share;
    int64_t blocks = (E + BLOCK - 1) / BLOCK;
    if (blocks < wanted) blocks = wanted < narrowest ? wanted : narrowest;
    const int64_t block = ((E + blocks - 1) / blocks + 15) / 16 * 16;
    parallel_tasks(N * blocks, [&](Tasks& tasks) {
        for (int64_t task = tasks.next(); task >= 0; task = tasks.next()) {
            const int64_t first = task % blocks * block, n = longest[size_t(task / blocks)].second;
            if (first < E) pass(op, n, first, first + block < E ? first + block : E);
        }
    });
}

}  // namespace latte

#define LATTE_FILE "rg_lru.cpp"
#include "each_isa.h"

namespace latte {

static RgLru inputs(Stack& stack) {
    RgLru op;
    op.x = stack.tensor(), op.r = stack.tensor(), op.i = stack.tensor(), op.theta = stack.tensor();
    op.initial = stack.maybe_tensor(), op.mask = stack.maybe_tensor();
    op.bounds = stack.maybe_tensor();
    return op;
}

static void check_inputs(const Expect& expect, const RgLru& op) {
    expect(op.x, "x", FLOATS, {ANY, ANY, ANY});
    expect(op.r, "recurrence_gate", op.x.dtype, op.x);
    expect(op.i, "input_gate", op.x.dtype, op.x);
    expect(op.theta, "theta", wide(op.x), {op.channels()});
    expect.sequences(op.x, op.mask, op.bounds);
    expect(op.initial, "initial", wide(op.x), {op.sequences(), op.channels()}, Layout::contiguous);
}

// (x, recurrence gate, input gate, theta, initial?, mask?, bounds?, reverse) -> (h, last)
static void forward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    RgLru op = inputs(stack);
    op.reverse = stack.flag();
    check_inputs(Expect("cpu_rg_lru"), op);
    const int64_t B = op.x.sizes[0], T = op.tokens(), E = op.channels();
    op.out = Tensor::empty({B, T, E}, op.x.dtype);
    op.last = Tensor::empty({op.sequences(), E}, wide(op.x));
    LATTE_CHOOSE(run_forward)(op);
    stack.give(op.out, op.last);
}

// (dh, dlast, the inputs, h, last, reverse) -> gradients of x, both gates, theta and initial (or
// empty)
static void backward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor dout = stack.tensor(), dlast = stack.tensor();
    RgLru op = inputs(stack);
    op.dout = static_cast<Tensor&&>(dout), op.dlast = static_cast<Tensor&&>(dlast);
    op.out = stack.tensor(), op.last = stack.tensor(), op.reverse = stack.flag();
    const Expect expect("cpu_rg_lru_backward");
    check_inputs(expect, op);
    const int64_t B = op.x.sizes[0], T = op.tokens(), E = op.channels(), N = op.sequences();
    expect(op.dout, "grad of h", op.x.dtype, op.x);
    expect(op.dlast, "grad of last", wide(op.x), {N, E});
    expect(op.out, "h", op.x.dtype, op.x, Layout::contiguous);
    expect(op.last, "last", wide(op.x), {N, E});
    for (Tensor* gradient : {&op.dx, &op.dr, &op.di})
        *gradient = Tensor::empty({B, T, E}, op.x.dtype);
    Tensor dtheta = Tensor::empty({E}, wide(op.x));
    op.dinitial = op.initial ? Tensor::empty({N, E}, wide(op.x)) : Tensor::empty({0}, wide(op.x));
    op.slopes.assign(size_t(N * E), 0.0);
    LATTE_CHOOSE(run_backward)(op);
    for (int64_t e = 0; e < E; ++e) {  // in one order, for any number of threads
        double sum = 0.0;
        for (int64_t n = 0; n < N; ++n) sum += op.slopes[size_t(n * E + e)];
        if (op.x.type() == Type::F64) dtheta.at<double>()[e] = sum;
        else dtheta.at<float>()[e] = float(sum);
    }
    stack.give(op.dx, op.dr, op.di, dtheta, op.dinitial);
}

static Register registered_forward("cpu_rg_lru", forward);
static Register registered_backward("cpu_rg_lru_backward", backward);

}  // namespace latte

#else  // once per instruction set

#include "gates.h"

// 8 softplus(theta) and its slope, of a block of channels.
template <class T>
static void strengths(const RgLru& op, int64_t first, int64_t stop, T* strength, T* slope) {
    for (int64_t e = first; e < stop; ++e) {
        double theta = number_at<double>(op.theta, e * op.theta.strides[0]);
        double rest = std::exp(theta < 0 ? theta : -theta);
        strength[e - first] = T(8 * ((theta > 0 ? theta : 0) + std::log1p(rest)));
        slope[e - first] = T(8 * (theta < 0 ? rest : 1.0) / (1.0 + rest));
    }
}

template <class S>
LATTE_INLINE const S* at_token(const Tensor& x, int64_t row, int64_t token, int64_t first) {
    return x.at<S>() + row * x.strides[0] + token * x.strides[1] + first * x.strides[2];
}

// Prefetches the memory of a V<T> of neighbouring elements, which may be two cache lines. The rows
// of a block are too short, and too far apart, for the processor to predict them.
template <class S>
LATTE_INLINE void ask_for(const S* from) {
    constexpr int64_t bytes = width<typename Computed<S>::type> * int64_t(sizeof(S));
    for (int64_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + at);
}

// The sigmoids of a row's gate, in a separate loop. In a longer chain of operations, the processor
// cannot look far enough ahead to begin the next vector. The memory of a later row is prefetched.
template <class S, class T>
static void open(const S* gate, int64_t stride, const S* next, int64_t size, T* to) {
    for (int64_t c = 0; c < size; c += width<T>) {
        ask_for(next + c * stride);
        store_all(to + c, sigmoid(load(gate + c * stride, stride, size - c)));
    }
}

template <class S>
static void walk_forward(RgLru& op, int64_t n, int64_t first, int64_t stop) {
    using T = typename Computed<S>::type;
    constexpr int64_t W = width<T>;
    const int64_t E = op.channels(), size = stop - first;
    const Walk walk(op, n);
    const int64_t start = walk.start<T>(op, n);
    alignas(64) T state[BLOCK] = {}, strength[BLOCK] = {}, slope[BLOCK];
    alignas(64) T opened_r[BLOCK], opened_i[BLOCK];
    strengths<T>(op, first, stop, strength, slope);
    if (op.initial) std::memcpy(state, op.initial.at<T>() + n * E + first, size * sizeof(T));
    const int64_t xs = op.x.strides[2], rs = op.r.strides[2], is = op.i.strides[2];
    for (int64_t step = 0; step < walk.count; ++step) {
        const int64_t token = walk.token(step);
        S* out = op.out.at<S>() + (walk.row * op.tokens() + token) * E + first;
        if (!walk.real(step)) {
            for (int64_t c = 0; c < size; c += W) store(out + c, load_all(state + c), size - c);
            continue;
        }
        const S* x = at_token<S>(op.x, walk.row, token, first);
        const S* r = at_token<S>(op.r, walk.row, token, first);
        const S* i = at_token<S>(op.i, walk.row, token, first);
        const int64_t soon = walk.token(step + AHEAD) - token;
        const S* next_x = x + soon * op.x.strides[1];
        open(r, rs, r + soon * op.r.strides[1], size, opened_r);
        open(i, is, i + soon * op.i.strides[1], size, opened_i);
        const bool fresh = step == start;
        for (int64_t c = 0; c < size; c += W) {
            const int64_t left = size - c;
            ask_for(next_x + c * xs);
            Kept<T> now = kept(load_all(opened_r + c), load_all(strength + c));
            V<T> gated = load_all(opened_i + c) * load(x + c * xs, xs, left);
            V<T> h = gated;
            if (!fresh) h = now.a * load_all(state + c) + now.factor * gated;
            store_all(state + c, h);
            store(out + c, h, left);
        }
    }
    std::memcpy(op.last.at<T>() + n * E + first, state, size * sizeof(T));
}

template <class S>
static void walk_backward(RgLru& op, int64_t n, int64_t first, int64_t stop) {
    using T = typename Computed<S>::type;
    constexpr int64_t W = width<T>;
    const int64_t E = op.channels(), size = stop - first;
    const Walk walk(op, n);
    const int64_t start = walk.start<T>(op, n);
    alignas(64) T initial[BLOCK] = {}, later[BLOCK] = {}, strength[BLOCK] = {}, slope[BLOCK];
    alignas(64) T opened_r[BLOCK], opened_i[BLOCK];
    alignas(64) T sums[BLOCK] = {};  // of dlog a_t r_t over a chunk
    strengths<T>(op, first, stop, strength, slope);
    if (op.initial) std::memcpy(initial, op.initial.at<T>() + n * E + first, size * sizeof(T));
    const T* dlast = op.dlast.at<T>() + n * op.dlast.strides[0];
    for (int64_t c = 0; c < size; ++c) later[c] = dlast[(first + c) * op.dlast.strides[1]];
    auto flush = [&, slopes = op.slopes.data() + n * E + first] {
        for (int64_t c = 0; c < size; ++c) slopes[c] -= double(sums[c]) * double(slope[c]);
        std::memset(sums, 0, sizeof sums);
    };
    const int64_t xs = op.x.strides[2], rs = op.r.strides[2], is = op.i.strides[2];
    const int64_t ds = op.dout.strides[2];
    for (int64_t step = walk.count - 1; step >= 0; --step) {
        if (step % CHUNK == CHUNK - 1) flush();
        const int64_t token = walk.token(step), row = walk.row;
        const int64_t at = (row * op.tokens() + token) * E + first;
        S *dx = op.dx.at<S>() + at, *dr = op.dr.at<S>() + at, *di = op.di.at<S>() + at;
        const S* dout = at_token<S>(op.dout, row, token, first);
        if (!walk.real(step)) {
            for (int64_t c = 0; c < size; c += W) {
                const int64_t left = size - c;
                V<T> none{};
                store_all(later + c, load_all(later + c) + load(dout + c * ds, ds, left));
                store(dx + c, none, left), store(dr + c, none, left), store(di + c, none, left);
            }
            continue;
        }
        const S* x = at_token<S>(op.x, row, token, first);
        const S* r = at_token<S>(op.r, row, token, first);
        const S* i = at_token<S>(op.i, row, token, first);
        const S* h = at_token<S>(op.out, row, walk.token(step - 1), first);
        const int64_t soon = walk.token(step - AHEAD) - token;
        const S* next_x = x + soon * op.x.strides[1];
        const S *next_h = h + soon * E, *next_dout = dout + soon * op.dout.strides[1];
        open(r, rs, r + soon * op.r.strides[1], size, opened_r);
        open(i, is, i + soon * op.i.strides[1], size, opened_i);
        for (int64_t c = 0; c < size; c += W) {
            const int64_t left = size - c;
            ask_for(next_x + c * xs), ask_for(next_h + c), ask_for(next_dout + c * ds);
            V<T> decays = load_all(opened_r + c), opened = load_all(opened_i + c);
            const V<T> strong = load_all(strength + c);
            Kept<T> now = kept(decays, strong);
            if (step == start) decays = now.a = V<T>{}, now.factor = all(T(1));
            V<T> before = step ? load(h + c, 1, left) : load_all(initial + c);
            V<T> g = load_all(later + c) + load(dout + c * ds, ds, left), moved = g * now.factor;
            V<T> gated = opened * load(x + c * xs, xs, left), log_a = -decays * strong;
            V<T> dlog = g * (now.a * before - gated * (now.a * now.a / now.factor));
            // Where it is cut off, a is fixed.
            dlog = select(all(LEAST_DECAY<T>) < log_a, V<T>{}, dlog);
            store(dx + c, moved * opened, left);
            store(di + c, moved * gated * (T(1) - opened), left);
            store(dr + c, dlog * log_a * (T(1) - decays), left);
            store_all(sums + c, load_all(sums + c) + dlog * decays);
            store_all(later + c, g * now.a);
        }
    }
    flush();
    if (op.initial) std::memcpy(op.dinitial.at<T>() + n * E + first, later, size * sizeof(T));
}

static void run_forward(RgLru& op) {
    by_dtype(op.x.type(), [&](auto s) { every_sequence<walk_forward<decltype(s)>>(op); });
}

static void run_backward(RgLru& op) {
    by_dtype(op.x.type(), [&](auto s) { every_sequence<walk_backward<decltype(s)>>(op); });
}

#endif

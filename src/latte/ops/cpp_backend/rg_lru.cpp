// The RG-LRU, fused from the gates on: one walk over each sequence forward, one backward.
//
//     r, i = sigmoid(recurrence gate), sigmoid(input gate),  log a_t = -8 r_t softplus(theta)
//     h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t
//     g_t = dh_t + a_{t+1} g_{t+1}                       the gradient that reaches h_t
//     dlog a_t = g_t (a_t h_{t-1} - i_t x_t a_t^2 / sqrt(1 - a_t^2))
//
// A task is one sequence and a block of channels, walked token by token: each input is read once,
// nothing is written but the results, and a sequence that is cut goes on in the same bits. Kept for
// the backward pass is one state per CHUNK tokens; the others are computed anew, a chunk at a time.
// Where a sequence starts a = 0 and the factor is 1; a masked token leaves the state as it is.
//
// Shapes: B batch, T tokens, E channels, N sequences (B, or the packed ones), M chunks of them all.
#ifndef LATTE_RG_LRU
#define LATTE_RG_LRU

#include "torch_abi.h"

namespace latte {

constexpr int64_t CHUNK = 32;    // tokens between two states that are kept
constexpr int64_t BLOCK = 256;   // channels of a task at most: what is computed anew fits the cache
constexpr int64_t AHEAD = 8;     // tokens by which memory is asked for before it is read

struct RgLru {
    Tensor x, r, i, theta, initial, mask, bounds;  // (B,T,E) x 3, (E,), (N,E), (B,T), (N+1,) int64
    bool reverse;
    Tensor out, last, kept;                     // (B,T,E), (N,E), (M,E)
    Tensor dout, dlast, dx, dr, di, dinitial;   // of the backward pass
    std::vector<double> slopes;                 // (N,E): dtheta of each sequence

    int64_t tokens() const { return x.sizes[1]; }
    int64_t channels() const { return x.sizes[2]; }
    int64_t sequences() const { return bounds ? bounds.sizes[0] - 1 : x.sizes[0]; }
    int64_t chunks() const {
        if (bounds) return tokens() / CHUNK + sequences();
        return x.sizes[0] * ((tokens() + CHUNK - 1) / CHUNK);
    }
};

// Where sequence n is, in the order in which it is walked.
struct Walk {
    int64_t row, begin, count, first_chunk;
    bool reverse;
    const bool* mask;

    Walk(const RgLru& op, int64_t n) : row(n), begin(0), count(op.tokens()), reverse(op.reverse) {
        first_chunk = n * ((count + CHUNK - 1) / CHUNK);
        if (op.bounds) {
            const int64_t* bounds = op.bounds.at<int64_t>();
            row = 0, begin = bounds[n], count = bounds[n + 1] - begin;
            first_chunk = begin / CHUNK + n;
        }
        mask = op.mask ? op.mask.at<bool>() + row * op.tokens() : nullptr;
    }
    // The token of a step; beyond the sequence's ends that of its last or first one.
    int64_t token(int64_t step) const {
        step = step < 0 ? 0 : step < count ? step : count - 1;
        return reverse ? begin + count - 1 - step : begin + step;
    }
    bool real(int64_t step) const { return !mask || mask[token(step)]; }
    // The step at which the sequence starts anew: -1 if it goes on from a state that is not all 0.
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
    // Wide blocks read memory best; narrower ones, of whole cache lines, if threads had no work.
    const int64_t narrowest = (E + 31) / 32, wanted = (threads + N - 1) / N;
    int64_t blocks = (E + BLOCK - 1) / BLOCK;
    if (blocks < wanted) blocks = wanted < narrowest ? wanted : narrowest;
    const int64_t block = ((E + blocks - 1) / blocks + 15) / 16 * 16;
    parallel(N * blocks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
            const int64_t first = task % blocks * block;
            if (first < E) pass(op, task / blocks, first, first + block < E ? first + block : E);
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

// (x, recurrence gate, input gate, theta, initial?, mask?, bounds?, reverse) -> (h, last, kept)
static void forward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    RgLru op = inputs(stack);
    op.reverse = stack.flag();
    const int64_t B = op.x.sizes[0], T = op.tokens(), E = op.channels();
    op.out = Tensor::empty({B, T, E}, op.x.dtype);
    op.last = Tensor::empty({op.sequences(), E}, wide(op.x));
    op.kept = Tensor::empty({op.chunks(), E}, wide(op.x));
    // Packed sequences may need fewer chunks than there are: what they keep is defined there too.
    const size_t number = op.x.type() == Type::F64 ? 8 : 4;
    if (op.bounds) std::memset(op.kept.data, 0, size_t(op.chunks() * E) * number);
    LATTE_CHOOSE(run_forward)(op);
    stack.give(op.out, op.last, op.kept);
}

// (dh, dlast, the inputs, kept, reverse) -> gradients of x, both gates, theta, initial (or empty)
static void backward(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor dout = stack.tensor(), dlast = stack.tensor();
    RgLru op = inputs(stack);
    op.dout = static_cast<Tensor&&>(dout), op.dlast = static_cast<Tensor&&>(dlast);
    op.kept = stack.tensor(), op.reverse = stack.flag();
    const int64_t B = op.x.sizes[0], T = op.tokens(), E = op.channels(), N = op.sequences();
    for (Tensor* gradient : {&op.dx, &op.dr, &op.di})
        *gradient = Tensor::empty({B, T, E}, op.x.dtype);
    Tensor dtheta = Tensor::empty({E}, wide(op.x));
    op.dinitial = op.initial ? Tensor::empty({N, E}, wide(op.x)) : Tensor::empty({0}, wide(op.x));
    op.slopes.assign(size_t(N * E), 0.0);
    LATTE_CHOOSE(run_backward)(op);
    for (int64_t e = 0; e < E; ++e) {  // in one order, however many threads there are
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

// Asks for memory that is needed soon: rows are too short, and too far apart, to be foreseen.
LATTE_INLINE void fetch(const void* at) { __builtin_prefetch(at); }

template <class S>
static void walk_forward(RgLru& op, int64_t n, int64_t first, int64_t stop) {
    using T = typename Computed<S>::type;
    constexpr int64_t W = width<T>;
    const int64_t E = op.channels(), size = stop - first;
    const Walk walk(op, n);
    const int64_t start = walk.start<T>(op, n);
    alignas(64) T state[BLOCK] = {}, strength[BLOCK] = {}, slope[BLOCK];
    strengths<T>(op, first, stop, strength, slope);
    if (op.initial) std::memcpy(state, op.initial.at<T>() + n * E + first, size * sizeof(T));
    T* kept = op.kept.at<T>() + walk.first_chunk * E + first;
    const int64_t xs = op.x.strides[2], rs = op.r.strides[2], is = op.i.strides[2];
    for (int64_t step = 0; step < walk.count; ++step) {
        if (step % CHUNK == 0) {
            std::memcpy(kept, state, size * sizeof(T));
            kept += E;
        }
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
        const S *next_x = x + soon * op.x.strides[1], *next_r = r + soon * op.r.strides[1];
        const S* next_i = i + soon * op.i.strides[1];
        const bool fresh = step == start;
        for (int64_t c = 0; c < size; c += W) {
            const int64_t left = size - c;
            fetch(next_x + c * xs), fetch(next_r + c * rs), fetch(next_i + c * is);
            Gates<T> gates = open<T>(
                load(r + c * rs, rs, left), load(i + c * is, is, left), load_all(strength + c));
            V<T> gated = gates.i * load(x + c * xs, xs, left);
            V<T> h = gated;
            if (!fresh) h = gates.a * load_all(state + c) + gates.factor * gated;
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
    struct alignas(64) Anew { T before[BLOCK], r[BLOCK], i[BLOCK], a[BLOCK], factor[BLOCK]; };
    Anew anew[CHUNK];
    alignas(64) T state[BLOCK] = {}, later[BLOCK] = {}, strength[BLOCK] = {}, slope[BLOCK];
    alignas(64) T sums[BLOCK];  // of dlog a_t r_t over a chunk
    strengths<T>(op, first, stop, strength, slope);
    const T* dlast = op.dlast.at<T>() + n * op.dlast.strides[0];
    for (int64_t c = 0; c < size; ++c) later[c] = dlast[(first + c) * op.dlast.strides[1]];
    double* slopes = op.slopes.data() + n * E + first;
    const int64_t xs = op.x.strides[2], rs = op.r.strides[2], is = op.i.strides[2];
    const int64_t ds = op.dout.strides[2];
    for (int64_t chunk = (walk.count + CHUNK - 1) / CHUNK - 1; chunk >= 0; --chunk) {
        const int64_t begin = chunk * CHUNK;
        const int64_t end = begin + CHUNK < walk.count ? begin + CHUNK : walk.count;
        std::memcpy(state, op.kept.at<T>() + (walk.first_chunk + chunk) * E + first,
                    size * sizeof(T));
        std::memset(sums, 0, sizeof sums);
        for (int64_t step = begin; step < end; ++step) {
            if (!walk.real(step)) continue;
            Anew& now = anew[step - begin];
            const int64_t token = walk.token(step);
            const S* x = at_token<S>(op.x, walk.row, token, first);
            const S* r = at_token<S>(op.r, walk.row, token, first);
            const S* i = at_token<S>(op.i, walk.row, token, first);
            const int64_t soon = walk.token(step - CHUNK) - token;
            const S *next_x = x + soon * op.x.strides[1], *next_r = r + soon * op.r.strides[1];
            const S* next_i = i + soon * op.i.strides[1];
            const bool fresh = step == start;
            for (int64_t c = 0; c < size; c += W) {
                const int64_t left = size - c;
                fetch(next_x + c * xs), fetch(next_r + c * rs), fetch(next_i + c * is);
                Gates<T> gates = open<T>(
                    load(r + c * rs, rs, left), load(i + c * is, is, left),
                    load_all(strength + c));
                V<T> before = load_all(state + c), gated = gates.i * load(x + c * xs, xs, left);
                store_all(now.before + c, before), store_all(now.r + c, gates.r);
                store_all(now.i + c, gates.i), store_all(now.a + c, gates.a);
                store_all(now.factor + c, gates.factor);
                if (!fresh) gated = gates.a * before + gates.factor * gated;
                store_all(state + c, gated);
            }
        }
        for (int64_t step = end - 1; step >= begin; --step) {
            const Anew& now = anew[step - begin];
            const int64_t token = walk.token(step);
            const int64_t at = (walk.row * op.tokens() + token) * E + first;
            const S* x = at_token<S>(op.x, walk.row, token, first);
            const S* dout = at_token<S>(op.dout, walk.row, token, first);
            S *dx = op.dx.at<S>() + at, *dr = op.dr.at<S>() + at, *di = op.di.at<S>() + at;
            const S* next = dout + (walk.token(step - AHEAD) - token) * op.dout.strides[1];
            const bool real = walk.real(step), fresh = step == start;
            for (int64_t c = 0; c < size; c += W) {
                const int64_t left = size - c;
                fetch(next + c * ds);
                V<T> g = load_all(later + c) + load(dout + c * ds, ds, left), none{};
                if (!real) {
                    store_all(later + c, g);
                    store(dx + c, none, left), store(dr + c, none, left), store(di + c, none, left);
                    continue;
                }
                V<T> i = load_all(now.i + c), input = load(x + c * xs, xs, left);
                if (fresh) {
                    store_all(later + c, none);
                    store(dx + c, g * i, left), store(dr + c, none, left);
                    store(di + c, g * input * i * (T(1) - i), left);
                    continue;
                }
                V<T> r = load_all(now.r + c), a = load_all(now.a + c);
                V<T> factor = load_all(now.factor + c), before = load_all(now.before + c);
                V<T> log_a = -r * load_all(strength + c), moved = g * factor;
                V<T> dlog = g * (a * before - i * input * (a * a / factor));
                dlog = select(all(LEAST_DECAY<T>) < log_a, none, dlog);  // a is fixed where it is cut off
                store(dx + c, moved * i, left);
                store(di + c, moved * input * i * (T(1) - i), left);
                store(dr + c, dlog * log_a * (T(1) - r), left);
                store_all(sums + c, load_all(sums + c) + dlog * r);
                store_all(later + c, g * a);
            }
        }
        for (int64_t c = 0; c < size; ++c) slopes[c] -= double(sums[c]) * double(slope[c]);
    }
    if (op.initial) std::memcpy(op.dinitial.at<T>() + n * E + first, later, size * sizeof(T));
}

static void run_forward(RgLru& op) {
    switch (op.x.type()) {
        case Type::F32: return every_sequence<walk_forward<float>>(op);
        case Type::F64: return every_sequence<walk_forward<double>>(op);
        case Type::BF16: return every_sequence<walk_forward<bf16>>(op);
        case Type::F16: return every_sequence<walk_forward<fp16>>(op);
    }
}

static void run_backward(RgLru& op) {
    switch (op.x.type()) {
        case Type::F32: return every_sequence<walk_backward<float>>(op);
        case Type::F64: return every_sequence<walk_backward<double>>(op);
        case Type::BF16: return every_sequence<walk_backward<bf16>>(op);
        case Type::F16: return every_sequence<walk_backward<fp16>>(op);
    }
}

#endif

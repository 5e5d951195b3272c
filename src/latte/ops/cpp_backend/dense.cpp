// The ops of a decoding step besides mixing: linear maps, norms, SwiGLU and the RG-LRU.
//
//     y = W x,   r + W x,   silu(G x) * (U x),   gelu(G x) * (U x)
//     y = (o + w) x / sqrt(mean(x^2) + eps)
//     r, i = sigmoid of block-diagonal affine maps of x,  log a = -8 r softplus(theta)
//     h' = a h + sqrt(1 - a^2) i x,   z = RMSNorm(h')
//
// For few rows of x, the time is that of reading the weights from memory. All threads read them,
// each weight once, in the order of memory. A task is one row of a matrix, or one block of the
// gates. The result of a row of x does not depend on the other rows, nor on how many there are.
//
// Shapes: R rows of x, all its dimensions but the last, E width, M outputs of a map, N blocks of P.
#ifndef LATTE_DENSE
#define LATTE_DENSE

#include <memory>

#include "maps.h"

namespace latte {

constexpr int64_t WEIGHTS = 16384;  // the fewest for which another thread saves time

struct Recurrence {
    Tensor x, weights[2], biases[2], theta;  // (R,E), (N,P,P), (E,), (E,): recurrence, input gate
    Tensor norm, state, real, out;           // (E,), (R,E), (R,), (R,E)
    double eps = 0.0;
};

}  // namespace latte

#define LATTE_FILE "dense.cpp"
#include "each_isa.h"

namespace latte {

// The rows and the weights of maps, then their outputs.
void check_maps(const Expect& expect, Maps& op, std::initializer_list<const char*> names) {
    check_rows(expect, op.x);
    for (int64_t m = 0; m < op.count; ++m)
        expect(op.weights[m], names.begin()[m], op.x.dtype,
               {op.gate != Gate::none && m ? op.weights[0].sizes[0] : ANY, width_of(op.x)});
    for (int64_t m = 0; m < (op.gate == Gate::none ? op.count : 1); ++m)
        if (!op.outs[m]) op.outs[m] = Tensor::like(op.x, op.weights[m].sizes[0]);
    expect(op.residual, "residual", op.x.dtype, op.outs[0], Layout::contiguous);
}

void check_norm(const Expect& expect, Norm& op, const char* name) {
    check_rows(expect, op.x);
    expect(op.weight, name, op.x.dtype, {width_of(op.x)});
    op.out = Tensor::like(op.x, width_of(op.x));
}

void check_latents(const Expect& expect, Latents& op) {
    expect(op.x, "x", FLOATS, {ANY, ANY});
    const int64_t R = op.x.sizes[0], E = op.x.sizes[1], H = op.heads;
    expect(op.weights[0], "latent_q", FLOATS, {ANY, E});
    const int32_t dtype = op.weights[0].dtype;
    expect(op.weights[1], "latent_k", dtype, {ANY, E});
    for (int64_t m : {0, 1}) {
        const int64_t outputs = op.weights[m].sizes[0];
        expect.that(H > 0 && outputs % H == 0, "heads must divide the logits");
        op.outs[m] = Tensor::empty({R, H, outputs / H}, dtype);
    }
    expect(op.bias, "latent_bias", dtype, {H});
    expect.that(!op.bias || op.outs[0].sizes[2] > 0, "latent_bias needs a logit in each head");
    expect.together({&op.up, &op.up_bias, &op.down, &op.down_bias},
                    "up, up_bias, down and down_bias");
    if (op.up) {
        expect(op.up, "up", dtype, {ANY, E});
        const int64_t U = op.up.sizes[0];
        expect(op.up_bias, "up_bias", dtype, {U}, Layout::contiguous);
        expect(op.down, "down", dtype, {ANY, U}, Layout::contiguous);
        expect(op.down_bias, "down_bias", dtype, {op.down.sizes[0]}, Layout::contiguous);
        op.hidden = Tensor::empty({R, U}, dtype);
    }
    op.score = Tensor::empty({R, op.down.size(0)}, dtype);
}

static Maps maps(StableIValue* arguments, int64_t count) {
    Stack stack(arguments);
    Maps op;
    op.x = stack.tensor(), op.count = count;
    for (int64_t m = 0; m < count; ++m) op.weights[m] = stack.tensor();
    return op;
}

// (x, weight, ...) -> as many outputs
template <int64_t count>
static void linear(StableIValue* arguments, uint64_t, uint64_t) {
    Maps op = maps(arguments, count);
    check_maps(Expect(count == 1   ? "cpu_linear"
                      : count == 2 ? "cpu_linear2"
                                   : "cpu_linear3"),
               op, {"a", "b", "c"});
    run(op);
    Stack results(arguments);
    if constexpr (count == 1) results.give(op.outs[0]);
    if constexpr (count == 2) results.give(op.outs[0], op.outs[1]);
    if constexpr (count == 3) results.give(op.outs[0], op.outs[1], op.outs[2]);
}

// (x, weight, residual) -> residual + x W^T
static void linear_add(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Maps op;
    op.x = stack.tensor(), op.weights[0] = stack.tensor(), op.residual = stack.tensor();
    op.count = 1;
    check_maps(Expect("cpu_linear_add"), op, {"weight"});
    run(op);
    stack.give(op.outs[0]);
}

// (x, gate, up) -> silu(gate x) * (up x), or with gelu
template <Gate gate>
static void gated(StableIValue* arguments, uint64_t, uint64_t) {
    Maps op = maps(arguments, 2);
    op.gate = gate;
    check_maps(Expect(gate == Gate::silu ? "cpu_swiglu" : "cpu_geglu"), op, {"gate", "up"});
    run(op);
    Stack(arguments).give(op.outs[0]);
}

// (x, weight, eps, offset) -> y
static void rms_norm(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Norm op;
    op.x = stack.tensor(), op.weight = stack.tensor(), op.eps = stack.number();
    op.offset = stack.number();
    check_norm(Expect("cpu_rms_norm"), op, "weight");
    run(op);
    stack.give(op.out);
}

// (x, latent_q, latent_k, latent_bias?, heads) -> q, k
static void latents(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Latents op;
    op.x = stack.tensor(), op.weights[0] = stack.tensor(), op.weights[1] = stack.tensor();
    op.bias = stack.maybe_tensor(), op.heads = stack.integer();
    check_latents(Expect("cpu_latents"), op);
    run(op);
    stack.give(op.outs[0], op.outs[1]);
}

// (x, recurrence gate's weight and bias, input gate's, theta, norm, eps, state!, real?) -> z: rows
// that have begun
static void rg_lru(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Recurrence op;
    op.x = stack.tensor();
    for (int gate : {0, 1}) op.weights[gate] = stack.tensor(), op.biases[gate] = stack.tensor();
    op.theta = stack.tensor(), op.norm = stack.tensor(), op.eps = stack.number();
    op.state = stack.tensor(true), op.real = stack.maybe_tensor();
    const Expect expect("cpu_rg_lru_step");
    expect(op.x, "x", FLOATS, {ANY, ANY});
    const int64_t R = op.x.sizes[0], E = op.x.sizes[1];
    const int32_t dtype = op.x.dtype;
    expect(op.weights[0], "recurrence_weight", dtype, {ANY, ANY, ANY}, Layout::contiguous);
    const int64_t N = op.weights[0].sizes[0], P = op.weights[0].sizes[1];
    expect(op.weights[0], "recurrence_weight", dtype, {N, P, P});
    expect.that(N * P == E, "recurrence_weight's blocks must have the channels of x together");
    expect(op.weights[1], "input_weight", dtype, {N, P, P}, Layout::contiguous);
    expect(op.biases[0], "recurrence_bias", dtype, {E}, Layout::contiguous);
    expect(op.biases[1], "input_bias", dtype, {E}, Layout::contiguous);
    expect(op.theta, "theta", dtype, {E}, Layout::contiguous), expect(op.norm, "norm", dtype, {E});
    expect(op.state, "state", wide(op.x), {R, E}, Layout::contiguous);
    expect(op.real, "real", aoti_torch_dtype_bool(), {R});
    op.out = Tensor::like(op.x, E);
    LATTE_CHOOSE(run_recurrence)(op);
    stack.give(op.out);
}

void run(Maps& op) { LATTE_CHOOSE(run_maps)(op); }
void run(Norm& op) { LATTE_CHOOSE(run_norm)(op); }
void run(Latents& op) { LATTE_CHOOSE(run_latents)(op); }

static Register registered_linear("cpu_linear", linear<1>);
static Register registered_linear2("cpu_linear2", linear<2>);
static Register registered_linear3("cpu_linear3", linear<3>);
static Register registered_linear_add("cpu_linear_add", linear_add);
static Register registered_swiglu("cpu_swiglu", gated<Gate::silu>);
static Register registered_geglu("cpu_geglu", gated<Gate::gelu>);
static Register registered_norm("cpu_rms_norm", rms_norm);
static Register registered_latents("cpu_latents", latents);
static Register registered_rg_lru("cpu_rg_lru_step", rg_lru);

}  // namespace latte

#else  // once per instruction set

#include "gates.h"
#include "rows.h"

// The rows of x, widened and padded with zeros to whole vectors.
template <class S>
struct Rows {
    using T = typename Computed<S>::type;
    int64_t count, size, step;
    std::vector<T> numbers;

    template <class Read>
    Rows(const Tensor& x, const Read& read) : count(rows_of(x)), size(width_of(x)) {
        step = (size + width<T> - 1) / width<T> * width<T>;
        numbers.resize(size_t(count * step));
        const int64_t stride = x.strides[x.dims - 1];
        for (int64_t row = 0; row < count; ++row) {
            const S* from = row_of<S>(x, row);
            for (int64_t c = 0; c < size; c += width<T>)
                store_all((*this)[row] + c, read(from + c * stride, stride, size - c));
        }
    }
    T* operator[](int64_t row) { return numbers.data() + row * step; }
    const T* operator[](int64_t row) const { return numbers.data() + row * step; }
};

// A whole vector in the order that is fastest to widen: for bf16 the even elements, then the odd
// ones.
template <class S>
LATTE_INLINE V<typename Computed<S>::type> load_shuffled(const S* from) {
    return load_all(from);
}
LATTE_INLINE V<float> load_shuffled(const bf16* from) {
    typename Raw<float>::integers pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    return {(typename Raw<float>::numbers)(pairs << 16),
            (typename Raw<float>::numbers)(pairs & int32_t(0xffff0000))};
}
template <class S>
static V<typename Computed<S>::type> read_shuffled(const S* from, int64_t stride, int64_t count) {
    constexpr int64_t W = width<typename Computed<S>::type>;
    S padded[W] = {};
    for (int64_t j = 0; j < W && j < count; ++j) padded[j] = from[j * stride];
    return load_shuffled(padded);
}

// The products of a row of weights with `count` rows of x that were read in the same order and are
// `apart` numbers from each other. Memory is fastest with one stream. Therefore rows of weights are
// read one after the other, and `fetch` prefetches data one page ahead.
template <int count, bool fetch, class S, class T>
LATTE_INLINE void dots(const S* weights, int64_t stride, const T* x, int64_t apart, int64_t size,
                       T* to) {
    constexpr int64_t step = width<T>, line = 64 / sizeof(S), ahead = 4096 / sizeof(S);
    V<T> sums[count][2] = {};
    auto add = [&](int n, int64_t c, V<T> weight) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < count; ++r)
            sums[r][n] = sums[r][n] + weight * load_all(x + r * apart + c);
    };
    auto add_vector = [&](int n, int64_t c) __attribute__((always_inline)) {
        for (int64_t l = 0; fetch && l < step; l += line)
            __builtin_prefetch(weights + c + l + ahead);
        add(n, c, load_shuffled(weights + c));
    };
    int64_t c = 0;
    if (stride == 1) {
        for (; c + 2 * step <= size; c += 2 * step) add_vector(0, c), add_vector(1, c + step);
        if (c + step <= size) add_vector(0, c), c += step;
    }
    for (; c < size; c += step) add(1, c, read_shuffled(weights + c * stride, stride, size - c));
#pragma GCC unroll 4
    for (int r = 0; r < count; ++r) to[r] = sum(sums[r][0] + sums[r][1]);
}

// Output o of a map for `count` rows of x from row r on, with the residual added if there is one.
template <int count, bool fetch, class S, class To>
static void apply_row(const Tensor& weight, const Rows<S>& x, int64_t o, int64_t r,
                      const S* residual, To* out) {
    typename Computed<S>::type y[count];
    dots<count, fetch>(weight.at<S>() + o * weight.strides[0], weight.strides[1], x[r], x.step,
                       x.size, y);
    for (int n = 0; n < count; ++n) {
        const int64_t at = (r + n) * weight.sizes[0] + o;
        narrow(residual ? y[n] + widen(residual[at]) : y[n], out[at]);
    }
}
// Outputs begin ... end. Several rows of x share a row of weights while it is in registers.
template <class S, class To>
static void apply_map(const Tensor& weight, const Rows<S>& x, int64_t begin, int64_t end,
                      const S* residual, To* out) {
    constexpr int together = LATTE_WIDTH == 64 ? 4 : 2;
    if (!x.count) return;
    for (int64_t o = begin; o < end; ++o) {
        int64_t r = x.count < together ? 1 : together;
        if (r == 1) apply_row<1, true>(weight, x, o, 0, residual, out);
        else apply_row<together, true>(weight, x, o, 0, residual, out);
        for (; r + together <= x.count; r += together)
            apply_row<together, false>(weight, x, o, r, residual, out);
        for (; r < x.count; ++r) apply_row<1, false>(weight, x, o, r, residual, out);
    }
}

template <class S>
static void apply_maps(Maps& op, const Rows<S>& x) {
    int64_t tasks = 0;
    for (int64_t m = 0; m < op.count; ++m) tasks += op.weights[m].sizes[0];
    parallel(tasks, 1 + WEIGHTS / (1 + x.size), [&](int64_t begin, int64_t end) {
        int64_t first = 0;
        for (int64_t m = 0; begin < end; first += op.weights[m++].sizes[0]) {
            const int64_t stop = std::min(end, first + op.weights[m].sizes[0]);
            if (begin >= stop) continue;
            apply_map(op.weights[m], x, begin - first, stop - first,
                      op.residual ? op.residual.at<S>() : nullptr, op.outs[m].at<S>());
            begin = stop;
        }
    });
}

// The first map, bent, times the second.
template <class S>
static void apply_gated(Maps& op, const Rows<S>& x) {
    using T = typename Computed<S>::type;
    const int64_t M = op.weights[0].sizes[0];
    const std::unique_ptr<T[]> sums(new T[size_t(2 * x.count * M)]);
    T *gate = sums.get(), *up = gate + x.count * M;
    parallel(M, 1 + WEIGHTS / (1 + x.size), [&](int64_t begin, int64_t end) {
        apply_map(op.weights[0], x, begin, end, static_cast<const S*>(nullptr), gate);
        apply_map(op.weights[1], x, begin, end, static_cast<const S*>(nullptr), up);
        for (int64_t r = 0; r < x.count; ++r)
            for (int64_t c = begin; c < end; c += width<T>) {
                const int64_t at = r * M + c, left = end - c;
                const V<T> g = load(gate + at, 1, left);
                const V<T> bent = op.gate == Gate::silu ? g * silu_factor(g) : gelu(g);
                const V<T> y = bent * load(up + at, 1, left);
                store(op.outs[0].at<S>() + at, y, left);
            }
    });
}

template <class S>
static void apply_norm(Norm& op) {
    using T = typename Computed<S>::type;
    const Rows<S> x(op.x, [](auto... from) { return load<S>(from...); });
    for (int64_t r = 0; r < x.count; ++r)
        norm_row(x[r], op.weight.at<S>(), op.weight.strides[0], T(op.eps), T(op.offset), x.size,
                 op.out.at<S>() + r * x.size);
}

// One block of channels of a row: its gates, and the state after the token.
template <class S, class T>
static void gate(Recurrence& op, int64_t r, int64_t n, const T* x, T* h) {
    const int64_t P = op.weights[0].sizes[1], first = n * P;
    const int64_t step = (P + width<T> - 1) / width<T> * width<T>;
    const bool real = !op.real || op.real.at<bool>()[r * op.real.strides[0]];
    T* state = op.state.at<T>() + r * op.state.strides[0] + first;
    if (!real) {
        std::copy(state, state + P, h + first);
        return;
    }
    std::vector<T> gates(size_t(2 * step));
    for (int64_t g : {0, 1}) {
        const Tensor &weight = op.weights[g], &bias = op.biases[g];
        T* sums = gates.data() + g * step;
        for (int64_t c = 0; c < P; c += width<T>)
            store_all(sums + c, load(bias.at<S>() + first + c, 1, P - c));
        const S* from = weight.at<S>() + n * P * P;
        for (int64_t p = 0; p < P; ++p, from += P)
            for (int64_t c = 0; c < P; c += width<T>)
                store_all(sums + c, load_all(sums + c) + load(from + c, 1, P - c) * x[first + p]);
    }
    for (int64_t c = 0; c < P; c += width<T>) {
        V<T> strength = T(8) * softplus(load(op.theta.at<S>() + first + c, 1, P - c));
        Kept<T> now = kept(sigmoid(load_all(gates.data() + c)), strength);
        V<T> gated = sigmoid(load_all(gates.data() + step + c)) * load(x + first + c, 1, P - c);
        V<T> after = now.a * load(state + c, 1, P - c) + now.factor * gated;
        store(state + c, after, P - c), store(h + first + c, after, P - c);
    }
}

template <class S>
static void recur(Recurrence& op) {
    using T = typename Computed<S>::type;
    auto read = [](auto... from) { return load<S>(from...); };
    const Rows<S> x(op.x, read);
    Rows<S> h(op.x, read);
    const int64_t N = op.weights[0].sizes[0], P = op.weights[0].sizes[1];
    parallel(x.count * N, 1 + WEIGHTS / (1 + 2 * P * P), [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task)
            gate<S, T>(op, task % x.count, task / x.count, x[task % x.count], h[task % x.count]);
    });
    for (int64_t r = 0; r < x.count; ++r)
        norm_row(h[r], op.norm.at<S>(), op.norm.strides[0], T(op.eps), T(0), x.size,
                 op.out.at<S>() + r * x.size);
}

static void run_maps(Maps& op) {
    by_dtype(op.x.type(), [&](auto s) {
        using S = decltype(s);
        const Rows<S> x(op.x, [](auto... from) { return read_shuffled<S>(from...); });
        op.gate == Gate::none ? apply_maps(op, x) : apply_gated(op, x);
    });
}

// The Gaussian error linear unit, exactly.
template <class T> LATTE_INLINE T exact_gelu(T x) {
    return T(0.5) * x * (T(1) + std::erf(x * T(0.70710678118654752)));
}

// The scores of rows whose products with `up` are known.
template <class S>
static void apply_scores(const Latents& op, const Rows<S>& x) {
    using T = typename Computed<S>::type;
    const int64_t U = op.up.sizes[0], G = op.down.sizes[0];
    std::vector<T> hidden(size_t(U), T(0));
    for (int64_t r = 0; r < x.count; ++r) {
        V<T> squares{};
        for (int64_t c = 0; c < x.step; c += width<T>) {
            const V<T> at = load_all(x[r] + c);
            squares = squares + at * at;
        }
        const T scale = T(1) / std::sqrt(sum(squares) / T(x.size) + T(op.eps));
        const S* found = op.hidden.at<S>() + r * U;
        for (int64_t u = 0; u < U; ++u)
            hidden[size_t(u)] =
                exact_gelu(T(widen(found[u])) * scale + T(widen(op.up_bias.at<S>()[u])));
        for (int64_t g = 0; g < G; ++g) {
            T y = T(widen(op.down_bias.at<S>()[g]));
            const S* down = op.down.at<S>() + g * U;
            for (int64_t u = 0; u < U; ++u) y += T(widen(down[u])) * hidden[size_t(u)];
            fp16 coarse;
            narrow(float(y), coarse), narrow(T(widen(coarse)), op.score.at<S>()[r * G + g]);
        }
    }
}

template <class S>
static void apply_latents(Latents& op) {
    using T = typename Computed<S>::type;
    const int64_t R = op.x.sizes[0], E = op.x.sizes[1];
    std::vector<T> wide(size_t(E), T(0));
    std::vector<S> rows(size_t(R * E), S{});
    for (int64_t r = 0; r < R; ++r) {
        gather(op.x, r * op.x.strides[0], op.x.strides[1], E, wide.data());
        for (int64_t c = 0; c < E; ++c) narrow(wide[size_t(c)], rows[size_t(r * E + c)]);
    }
    const int64_t sizes[] = {R, E}, strides[] = {E, 1};
    Tensor cast;
    cast.data = reinterpret_cast<char*>(rows.data()), cast.dims = 2;
    cast.sizes = sizes, cast.strides = strides;
    const Rows<S> x(cast, [](auto... from) { return read_shuffled<S>(from...); });
    Maps maps;
    maps.count = op.up ? 3 : 2;
    for (int m : {0, 1})
        maps.weights[m] = std::move(op.weights[m]), maps.outs[m] = std::move(op.outs[m]);
    if (op.up) maps.weights[2] = std::move(op.up), maps.outs[2] = std::move(op.hidden);
    apply_maps(maps, x);
    for (int m : {0, 1})
        op.weights[m] = std::move(maps.weights[m]), op.outs[m] = std::move(maps.outs[m]);
    if (op.bias) {
        const int64_t H = op.heads, L = op.outs[0].sizes[2];
        for (int64_t r = 0; r < R; ++r)
            for (int64_t h = 0; h < H; ++h) {
                S& q = op.outs[0].at<S>()[(r * H + h) * L];
                narrow(T(widen(q)) + T(widen(op.bias.at<S>()[h * op.bias.strides[0]])), q);
            }
    }
    if (!maps.weights[2]) return;
    op.up = std::move(maps.weights[2]), op.hidden = std::move(maps.outs[2]);
    apply_scores(op, x);
}

static void run_latents(Latents& op) {
    by_dtype(op.weights[0].type(), [&](auto s) { apply_latents<decltype(s)>(op); });
}

static void run_norm(Norm& op) {
    by_dtype(op.x.type(), [&](auto s) { apply_norm<decltype(s)>(op); });
}

static void run_recurrence(Recurrence& op) {
    by_dtype(op.x.type(), [&](auto s) { recur<decltype(s)>(op); });
}

#endif

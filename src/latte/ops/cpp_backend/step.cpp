// One token of decoding: Latte, Latte-Macchiato and the window, their states written in place.
//
//     A' = logaddexp(A, k),  mu' = mu + e^{k-A'} (v - mu),  e^{k-A'} = sigmoid(k - A)
//     where latents forget, A + log_decay in the place of A
//     y = p(0) SWA + sum_{l>=1} p(l) mu'[l],  p = softmax over L + 1 logits (L without a window)
//
// The window is a ring: the token goes into one slot, and attention runs over all slots that hold
// a token. A task is one head of one row. A token that is not real does not change the latents, and
// its slot is masked.
//
// Delayed latents receive the token that leaves the window. The new token takes its slot. A ring
// for latent keys exists beside those for keys and values. While the latents have received nothing,
// p(0) = 1.
//
// Sinks are the first n real tokens of a row. A sink that is W positions or more before the token
// has left the window. It is then an additional slot, for which the query is rotated by a separate
// table.
//
// Shapes: B batch, H query heads, G key/value heads, L latents, K key width, D value width, W
// slots, n sinks.
#ifndef LATTE_STEP
#define LATTE_STEP

#include "expect.h"
#include "torch_abi.h"

namespace latte {

struct Step {
    Tensor latent_q, latent_k, q, k, v;     // (B,H,L or L+1), (B,H,L), (B,H,K), (B,G,K), (B,G,D)
    Tensor log_mass, mean, log_decay;       // (B,H,L), (B,H,L,D), (B,H,L) or (H,L)
    Tensor keys, values, mask, slot, real;  // (B,G,W,K), (B,G,W,D), (B,W), (1,) int64, (B,)
    Tensor cos, sin;                        // (B or 1, 1, 1 or 2, K/2): the last of each row
    Tensor pending;                         // (B,H,W,L): delayed latents' keys of the ring's tokens
    Tensor sink_keys, sink_values;          // (B,G,n,K), (B,G,n,D)
    Tensor position, sink_cos, sink_sin;    // (B,) int64: real tokens before; as cos and sin
    double scale = 1.0, softcap = 0.0;      // 0: none
    bool joint = false;                     // p(0)'s logit has the window's logsumexp added
    int64_t length = 0;                     // slots that are used
    Tensor out;                             // (B,H,D)

    bool latents() const { return bool(mean); }
    bool window() const { return bool(keys); }
    int64_t sinks() const { return sink_keys.size(2); }
    int64_t place(int64_t b) const { return position.at<int64_t>()[b * position.strides[0]]; }
    int64_t heads() const { return latents() ? mean.sizes[1] : q.sizes[1]; }
    int64_t group(int64_t head) const { return head / (heads() / v.sizes[1]); }
    bool is_real(int64_t b) const { return !real || real.at<bool>()[b * real.strides[0]]; }
};

}  // namespace latte

#define LATTE_FILE "step.cpp"
#include "each_isa.h"

namespace latte {

static void latents(Stack& stack, Step& step) {
    step.log_mass = stack.tensor(true), step.mean = stack.tensor(true);
    step.log_decay = stack.maybe_tensor();
}

static void ring(Stack& stack, Step& step) {
    step.keys = stack.tensor(true), step.values = stack.tensor(true);
    step.mask = stack.maybe_tensor(true), step.slot = stack.tensor();
    step.cos = stack.maybe_tensor(), step.sin = stack.maybe_tensor();
}

static void far(Stack& stack, Step& step) {
    step.sink_keys = stack.maybe_tensor(true), step.sink_values = stack.maybe_tensor(true);
    step.position = stack.maybe_tensor();
    step.sink_cos = stack.maybe_tensor(), step.sink_sin = stack.maybe_tensor();
}

static void check_latents(const Expect& expect, const Step& step) {
    expect(step.mean, "mean", wide(step.v), {ANY, ANY, ANY, ANY}, Layout::contiguous);
    const int64_t B = step.v.sizes[0], H = step.mean.sizes[1], L = step.mean.sizes[2];
    expect(step.mean, "mean", wide(step.v), {B, H, L, step.v.sizes[2]});
    expect(step.log_mass, "log_mass", wide(step.v), {B, H, L}, Layout::contiguous);
    expect(step.latent_q, "latent_q", FLOATS, {B, H, L + step.window()});
    expect(step.latent_k, "latent_k", FLOATS, {B, H, L});
    if (step.log_decay.dims == 2) expect(step.log_decay, "log_decay", FLOATS, {H, L});
    else expect(step.log_decay, "log_decay", FLOATS, {B, H, L});
}

static void check_angles(const Expect& expect, const Step& step, const Tensor& cos,
                         const Tensor& sin) {
    expect.together({&cos, &sin}, "cosines and sines");
    if (!cos) return;
    const int64_t rows = cos.dims && cos.sizes[0] == 1 ? 1 : step.v.sizes[0];
    expect(cos, "cos", wide(step.v), {rows, 1, ANY, ANY});
    const int64_t others = sin.dims && sin.sizes[0] == 1 ? 1 : rows;
    expect(sin, "sin", wide(step.v), {others, 1, ANY, cos.sizes[3]});
    expect.that(cos.sizes[2] >= 1 && sin.sizes[2] >= 1, "angles must have at least one row");
    expect.that(2 * cos.sizes[3] <= step.keys.sizes[3], "angles must be for the width of the keys");
}

static void check_window(const Expect& expect, const Step& step) {
    const int32_t dtype = step.v.dtype, whole = aoti_torch_dtype_int64();
    expect(step.keys, "keys", dtype, {ANY, ANY, ANY, ANY}, Layout::contiguous);
    const int64_t B = step.v.sizes[0], G = step.v.sizes[1], D = step.v.sizes[2];
    const int64_t W = step.keys.sizes[2], K = step.keys.sizes[3], n = step.sinks();
    expect(step.keys, "keys", dtype, {B, G, W, K});
    expect(step.values, "values", dtype, {B, G, W, D}, Layout::contiguous);
    expect(step.mask, "mask", aoti_torch_dtype_bool(), {B, W}, Layout::contiguous);
    expect(step.q, "q", dtype, {B, step.heads(), K}), expect(step.k, "k", dtype, {B, G, K});
    expect.that(step.length >= 1 && step.length <= W,
                "length must be from 1 to the window's slots");
    expect(step.slot, "slot", whole, {1}), expect.between(step.slot, "slot", 0, W - 1);
    check_angles(expect, step, step.cos, step.sin);
    expect(step.pending, "pending", dtype, {B, step.heads(), W, step.mean.size(2)},
           Layout::contiguous);
    expect.together({&step.sink_keys, &step.sink_values, &step.position},
                    "sink_keys, sink_values and position");
    expect(step.sink_keys, "sink_keys", dtype, {B, G, n, K}, Layout::contiguous);
    expect(step.sink_values, "sink_values", dtype, {B, G, n, D}, Layout::contiguous);
    expect(step.position, "position", whole, {B}, Layout::contiguous);
    expect.between(step.position, "position", 0, std::numeric_limits<int64_t>::max());
    check_angles(expect, step, step.sink_cos, step.sink_sin);
}

static void finish(Stack& stack, Step& step, const char* name) {
    const Expect expect(name);
    expect(step.v, "v", FLOATS, {ANY, ANY, ANY});
    if (step.latents()) check_latents(expect, step);
    else expect(step.q, "q", FLOATS, {ANY, ANY, ANY});
    const int64_t H = step.heads(), G = step.v.sizes[1];
    expect.that(G >= 1 && H % G == 0, "the heads of v must divide those of the queries");
    expect(step.real, "real", aoti_torch_dtype_bool(), {step.v.sizes[0]});
    if (step.window()) check_window(expect, step);
    step.out = Tensor::empty({step.v.sizes[0], step.heads(), step.v.sizes[2]}, step.v.dtype);
    LATTE_CHOOSE(run)(step);
    stack.give(step.out);
}

// (q, k, v, log_mass!, mean!, log_decay?, real?) -> y
static void latte_step(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Step step;
    step.latent_q = stack.tensor(), step.latent_k = stack.tensor(), step.v = stack.tensor();
    latents(stack, step);
    step.real = stack.maybe_tensor();
    finish(stack, step, "cpu_latte_step");
}

// (latent_q, latent_k, q, k, v, log_mass!, mean!, log_decay?, keys!, values!, mask?!, slot, cos?,
// sin?, real?, scale, softcap, pending?!, sink_keys?!, sink_values?!, position?, sink_cos?,
// sink_sin?, joint) -> y
static void macchiato_step(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Step step;
    step.latent_q = stack.tensor(), step.latent_k = stack.tensor();
    step.q = stack.tensor(), step.k = stack.tensor(), step.v = stack.tensor();
    latents(stack, step);
    ring(stack, step);
    step.real = stack.maybe_tensor();
    step.scale = stack.number(), step.softcap = stack.number();
    step.pending = stack.maybe_tensor(true);
    far(stack, step), step.joint = stack.flag();
    step.length = step.keys.size(2);
    finish(stack, step, "cpu_macchiato_step");
}

// (q, k, v, keys!, values!, mask?!, slot, cos?, sin?, real?, scale, softcap, length, sink_keys?!,
// sink_values?!, position?, sink_cos?, sink_sin?) -> y
static void window_step(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Step step;
    step.q = stack.tensor(), step.k = stack.tensor(), step.v = stack.tensor();
    ring(stack, step);
    step.real = stack.maybe_tensor();
    step.scale = stack.number(), step.softcap = stack.number();
    step.length = stack.integer();
    far(stack, step);
    finish(stack, step, "cpu_window_step");
}

static Register registered_latte("cpu_latte_step", latte_step);
static Register registered_macchiato("cpu_macchiato_step", macchiato_step);
static Register registered_window("cpu_window_step", window_step);

}  // namespace latte

#else  // once per instruction set

// A row of a (B, heads, n) tensor, widened.
template <class S, class T>
static void row(const Tensor& x, int64_t b, int64_t head, T* to) {
    const S* from = x.at<S>() + b * x.strides[0] + head * x.strides[1];
    for (int64_t j = 0; j < x.sizes[2]; ++j) to[j] = T(widen(from[j * x.strides[2]]));
}
// The same of a tensor of any dtype: latent logits may be more exact than the values.
template <class T>
static void logits_of(const Tensor& x, int64_t b, int64_t head, T* to) {
    by_dtype(x.type(), [&](auto s) { row<decltype(s)>(x, b, head, to); });
}

// Turns the pairs (i, i + K/2) of a query or key by the angles of row b.
template <class T>
static void rotate(const Tensor& cosines, const Tensor& sines, int64_t b, T* x) {
    if (!cosines) return;
    auto last = [b](const Tensor& table) {
        const int64_t row = table.sizes[0] > 1 ? b : 0;
        return table.at<T>() + row * table.strides[0] + (table.sizes[2] - 1) * table.strides[2];
    };
    const T *cos = last(cosines), *sin = last(sines);
    const int64_t half = cosines.sizes[3], c = cosines.strides[3], s = sines.strides[3];
    for (int64_t j = 0; j < half; ++j) {
        const T first = x[j], second = x[j + half];
        x[j] = first * cos[j * c] - second * sin[j * s];
        x[j + half] = second * cos[j * c] + first * sin[j * s];
    }
}

// Logits become weights that sum to 1: all 0 if every one is -inf. Returns their logsumexp.
template <class T>
static T softmax(T* x, int64_t count) {
    T top = x[0], sum = 0;
    for (int64_t j = 1; j < count; ++j) top = x[j] > top ? x[j] : top;
    const bool none = top == -std::numeric_limits<T>::infinity();
    for (int64_t c = 0; c < count; c += width<T>)
        store(x + c, none ? V<T>{} : decay(load(x + c, 1, count - c) - top).kept, count - c);
    for (int64_t j = 0; j < count; ++j) sum += x[j];
    const T share = none ? T(0) : T(1) / sum;
    for (int64_t j = 0; j < count; ++j) x[j] *= share;
    return none ? top : top + std::log(sum);
}

// Latents of one head after a source, if it is real; adds sum_l p[l] mu'[l] to y.
template <class T>
static void see(const Step& step, int64_t b, int64_t head, bool real, const T* k, const T* v,
                const T* p, T* y) {
    const int64_t L = step.mean.sizes[2], D = step.mean.sizes[3], at = b * step.heads() + head;
    T *log_mass = step.log_mass.at<T>() + at * L, *mean = step.mean.at<T>() + at * L * D;
    const Tensor& decay = step.log_decay;
    const int64_t rows = decay.dims == 3, *strides = decay.strides + rows;
    const int64_t first = rows * b * decay.strides[0] + head * strides[0];
    for (int64_t l = 0; l < L; ++l, mean += D) {
        T gain = 0, kept = 1;
        if (real) {
            if (decay) log_mass[l] += number_at<T>(decay, first + l * strides[1]);
            const T gap = k[l] - log_mass[l], small = std::exp(-std::abs(gap));
            gain = (gap < 0 ? small : T(1)) / (T(1) + small);
            kept = (gap < 0 ? T(1) : small) / (T(1) + small);
            log_mass[l] = (gap < 0 ? log_mass[l] : k[l]) + std::log1p(small);
        }
        for (int64_t c = 0; c < D; c += width<T>) {
            V<T> mu = load(mean + c, 1, D - c);
            if (real) {
                V<T> change = load(v + c, 1, D - c) - mu;
                // From whichever end is nearer: the empty state becomes v itself.
                mu = gain < T(0.5) ? mu + change * gain : load(v + c, 1, D - c) - change * kept;
                store(mean + c, mu, D - c);
            }
            store(y + c, load(y + c, 1, D - c) + mu * p[l], D - c);
        }
    }
}

// Whether the latents of one head have seen any source.
template <class T>
static bool has_seen(const Step& step, int64_t b, int64_t head) {
    const int64_t L = step.mean.sizes[2];
    const T* log_mass = step.log_mass.at<T>() + (b * step.heads() + head) * L;
    return std::any_of(log_mass, log_mass + L,
                       [](T x) { return x != -std::numeric_limits<T>::infinity(); });
}

template <class S, class T>
LATTE_INLINE T logit_of(const Step& step, const T* q, const S* key) {
    const int64_t K = step.keys.sizes[3];
    V<T> sums{};
    for (int64_t c = 0; c < K; c += width<T>)
        sums = sums + load(q + c, 1, K - c) * load(key + c, 1, K - c);
    const T logit = sum(sums) * T(step.scale);
    return step.softcap ? T(step.softcap) * std::tanh(logit / T(step.softcap)) : logit;
}

template <class S, class T>
LATTE_INLINE void add_value(const Step& step, T share, const S* value, T* y) {
    if (share == T(0)) return;
    const int64_t D = step.values.sizes[3];
    for (int64_t c = 0; c < D; c += width<T>)
        store(y + c, load(y + c, 1, D - c) + load(value + c, 1, D - c) * share, D - c);
}

// Adds softmax attention over the ring's slots and the sinks that have left it to y, and returns
// the logsumexp; `logits` has room for them, `far_q` is the query rotated for sinks.
template <class S, class T>
static T attend(const Step& step, int64_t b, int64_t head, const T* q, const T* far_q, T* logits,
                T* y) {
    const int64_t W = step.keys.sizes[2], K = step.keys.sizes[3], D = step.values.sizes[3];
    const int64_t at = b * step.keys.sizes[1] + step.group(head), n = step.sinks();
    const S *keys = step.keys.at<S>() + at * W * K, *values = step.values.at<S>() + at * W * D;
    const S* sink_keys = n ? step.sink_keys.at<S>() + at * n * K : nullptr;
    const S* sink_values = n ? step.sink_values.at<S>() + at * n * D : nullptr;
    // Those that have left it come first.
    const int64_t gone = n ? std::clamp<int64_t>(step.place(b) - W + 1, 0, n) : 0;
    const bool* seen = step.mask ? step.mask.at<bool>() + b * W : nullptr;
    for (int64_t w = 0; w < step.length; ++w)
        logits[w] = seen && !seen[w] ? -std::numeric_limits<T>::infinity()
                                     : logit_of(step, q, keys + w * K);
    for (int64_t j = 0; j < gone; ++j)
        logits[step.length + j] = logit_of(step, far_q, sink_keys + j * K);
    const T log_mass = softmax(logits, step.length + gone);
    for (int64_t w = 0; w < step.length; ++w) add_value(step, logits[w], values + w * D, y);
    for (int64_t j = 0; j < gone; ++j)
        add_value(step, logits[step.length + j], sink_values + j * D, y);
    return log_mass;
}

// The source that delayed latents receive: the token that leaves the window, (B,H,L) and (B,G,D).
template <class T>
struct Leaving {
    std::vector<T> k, v;
    std::vector<char> real;
};

template <class S, class T>
static Leaving<T> leaving(const Step& step) {
    Leaving<T> out;
    if (!step.pending) return out;
    const int64_t B = step.keys.sizes[0], W = step.keys.sizes[2], slot = *step.slot.at<int64_t>();
    auto held = [&](const Tensor& ring) {
        const int64_t n = ring.sizes[3], rows = B * ring.sizes[1];
        std::vector<T> x(size_t(rows * n));
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t j = 0; j < n; ++j)
                x[r * n + j] = T(widen(ring.at<S>()[(r * W + slot) * n + j]));
        return x;
    };
    out.k = held(step.pending), out.v = held(step.values);
    for (int64_t b = 0; b < B; ++b)
        out.real.push_back(!step.mask || step.mask.at<bool>()[b * W + slot]);
    return out;
}

// Puts the token into its slot, and among the sinks if it is one; padding is zeros, and masked.
template <class S>
static void take_in(Step& step) {
    const int64_t B = step.keys.sizes[0], G = step.keys.sizes[1], W = step.keys.sizes[2];
    const int64_t K = step.keys.sizes[3], D = step.values.sizes[3], slot = *step.slot.at<int64_t>();
    const int64_t H = step.heads(), L = step.pending ? step.pending.sizes[3] : 0;
    std::vector<typename Computed<S>::type> x(size_t(std::max({K, D, L})));
    auto put = [&](bool real, int64_t n, S* to) {
        for (int64_t j = 0; j < n; ++j) real ? narrow(x[j], to[j]) : void(to[j] = S{});
    };
    for (int64_t b = 0; b < B; ++b) {
        const bool real = step.is_real(b);
        const int64_t n = step.sinks(), place = n && real ? step.place(b) : n;
        for (int64_t g = 0; g < G; ++g) {
            const int64_t at = (b * G + g) * W + slot, sink = (b * G + g) * n + place;
            row<S>(step.k, b, g, x.data()), rotate(step.cos, step.sin, b, x.data());
            put(real, K, step.keys.at<S>() + at * K);
            if (place < n) put(true, K, step.sink_keys.at<S>() + sink * K);
            row<S>(step.v, b, g, x.data()), put(real, D, step.values.at<S>() + at * D);
            if (place < n) put(true, D, step.sink_values.at<S>() + sink * D);
        }
        for (int64_t head = 0; step.pending && head < H; ++head) {
            logits_of(step.latent_k, b, head, x.data());
            put(real, L, step.pending.at<S>() + ((b * H + head) * W + slot) * L);
        }
        if (step.mask) step.mask.at<bool>()[b * W + slot] = real;
    }
}

template <class S, class T>
static void heads(Step& step, const Leaving<T>& left, int64_t begin, int64_t end) {
    const int64_t H = step.heads(), D = step.v.sizes[2], first = step.window() ? 1 : 0;
    const int64_t L = step.latents() ? step.mean.sizes[2] : 0, G = step.v.sizes[1];
    std::vector<T> p(size_t(L + 1)), k(size_t(L + 1)), v(static_cast<size_t>(D));
    std::vector<T> y(static_cast<size_t>(D)), q(size_t(step.window() ? step.keys.sizes[3] : 0));
    std::vector<T> logits(static_cast<size_t>(step.length + step.sinks()));
    std::vector<T> far_q, near(static_cast<size_t>(D));
    for (int64_t task = begin; task < end; ++task) {
        const int64_t b = task / H, head = task % H;
        std::fill(y.begin(), y.end(), T(0)), std::fill(near.begin(), near.end(), T(0));
        T weight = 1, log_mass = 0;
        if (step.window()) {
            row<S>(step.q, b, head, q.data());
            if (step.sinks()) far_q = q, rotate(step.sink_cos, step.sink_sin, b, far_q.data());
            rotate(step.cos, step.sin, b, q.data());
            log_mass = attend<S>(step, b, head, q.data(), far_q.data(), logits.data(), near.data());
        }
        if (step.latents()) {
            logits_of(step.latent_q, b, head, p.data());
            if (step.joint) p[0] += log_mass;
            softmax(p.data(), L + first);
            weight = p[0];
            bool real = step.is_real(b);
            const T *key = k.data(), *value = v.data();
            if (step.pending) {
                key = left.k.data() + task * L, real = left.real[b];
                value = left.v.data() + (b * G + step.group(head)) * D;
            } else {
                logits_of(step.latent_k, b, head, k.data());
                row<S>(step.v, b, step.group(head), v.data());
            }
            see(step, b, head, real, key, value, p.data() + first, y.data());
            if (step.pending && !has_seen<T>(step, b, head)) weight = 1;
        }
        S* out = step.out.at<S>() + task * D;
        for (int64_t c = 0; c < D; c += width<T>) {
            const V<T> far = load(y.data() + c, 1, D - c), local = load(near.data() + c, 1, D - c);
            store(out + c, step.window() ? far + local * weight : far, D - c);
        }
    }
}

template <class S>
static void run_as(Step& step) {
    using T = typename Computed<S>::type;
    Leaving<T> left;
    if (step.window()) { left = leaving<S, T>(step), take_in<S>(step); }
    const int64_t D = step.v.sizes[2], L = step.latents() ? step.mean.sizes[2] : 0;
    const int64_t work = L * (D + 64) + (step.length + step.sinks()) * 2 * D + D;
    parallel(step.v.sizes[0] * step.heads(), 1 + 40000 / work,
             [&](int64_t begin, int64_t end) { heads<S>(step, left, begin, end); });
}

static void run(Step& step) {
    by_dtype(step.v.type(), [&](auto s) { run_as<decltype(s)>(step); });
}

#endif

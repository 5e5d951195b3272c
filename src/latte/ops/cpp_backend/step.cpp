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
// Sinks are the first n valid tokens of a row. A sink that is W positions or more before the token
// has left the window. It is then an additional slot, for which the query is rotated by a separate
// table.
//
// Shapes: B batch, H query heads, G key/value heads, L latents, K key width, D value width, W
// slots, n sinks.
#ifndef LATTE_STEP
#define LATTE_STEP

#include "step_checks.h"

namespace latte {

struct Step {
    Tensor latent_q, latent_k, q, k, v;     // (B,H,L or L+1), (B,H,L), (B,H,K), (B,G,K), (B,G,D)
    Tensor log_mass, mean, log_decay;       // (B,H,L), (B,H,L,D), (B,H,L) or (H,L)
    Tensor keys, values, mask, slot, real;  // (B,G,W,K), (B,G,W,D), (B,W), (1,) int64, (B,)
    Tensor cos, sin;                        // (B or 1, 1, 1 or 2, K/2): the last of each row
    Tensor pending;                         // (B,H,W,L): delayed latents' keys of the ring's tokens
    Tensor sink_keys, sink_values;          // (B,G,n,K), (B,G,n,D)
    Tensor position, sink_cos, sink_sin;    // (B,) int64: valid tokens before; as cos and sin
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
    check_angles(expect, step.v, K, step.cos, step.sin);
    expect(step.pending, "pending", dtype, {B, step.heads(), W, step.mean.size(2)},
           Layout::contiguous);
    expect.together({&step.sink_keys, &step.sink_values, &step.position},
                    "sink_keys, sink_values and position");
    expect(step.sink_keys, "sink_keys", dtype, {B, G, n, K}, Layout::contiguous);
    expect(step.sink_values, "sink_values", dtype, {B, G, n, D}, Layout::contiguous);
    expect(step.position, "position", whole, {B}, Layout::contiguous);
    expect.between(step.position, "position", 0, std::numeric_limits<int64_t>::max());
    check_angles(expect, step.v, K, step.sink_cos, step.sink_sin);
}

// (latent_q, latent_k, q, k, v, log_mass!, mean!, log_decay?, keys!, values!, mask?!, slot, cos?,
// sin?, real?, scale, softcap, pending?!, length, sink_keys?!, sink_values?!, position?, sink_cos?,
// sink_sin?, joint) -> y, without what belongs to latents or to a window if there are none. The
// length is an argument of a window alone, and pending and joint are of latents beside one.
template <bool latents, bool window>
static void take_step(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Step step;
    if (latents) step.latent_q = stack.tensor(), step.latent_k = stack.tensor();
    if (window) step.q = stack.tensor(), step.k = stack.tensor();
    step.v = stack.tensor();
    if (latents) {
        step.log_mass = stack.tensor(true), step.mean = stack.tensor(true);
        step.log_decay = stack.maybe_tensor();
    }
    if (window) {
        step.keys = stack.tensor(true), step.values = stack.tensor(true);
        step.mask = stack.maybe_tensor(true), step.slot = stack.tensor();
        step.cos = stack.maybe_tensor(), step.sin = stack.maybe_tensor();
    }
    step.real = stack.maybe_tensor();
    if (window) {
        step.scale = stack.number(), step.softcap = stack.number();
        if (latents) step.pending = stack.maybe_tensor(true), step.length = step.keys.size(2);
        else step.length = stack.integer();
        step.sink_keys = stack.maybe_tensor(true), step.sink_values = stack.maybe_tensor(true);
        step.position = stack.maybe_tensor();
        step.sink_cos = stack.maybe_tensor(), step.sink_sin = stack.maybe_tensor();
        step.joint = latents && stack.flag();
    }
    const Expect expect(latents && window ? "cpu_macchiato_step"
                        : latents         ? "cpu_latte_step"
                                          : "cpu_window_step");
    expect(step.v, "v", FLOATS, {ANY, ANY, ANY});
    if (latents) check_latents(expect, step);
    else expect(step.q, "q", FLOATS, {ANY, ANY, ANY});
    const int64_t H = step.heads(), G = step.v.sizes[1];
    expect.that(G >= 1 && H % G == 0, "the heads of v must divide those of the queries");
    expect(step.real, "real", aoti_torch_dtype_bool(), {step.v.sizes[0]});
    if (window) check_window(expect, step);
    step.out = Tensor::empty({step.v.sizes[0], H, step.v.sizes[2]}, step.v.dtype);
    LATTE_CHOOSE(run)(step);
    stack.give(step.out);
}

static Register registered_latte("cpu_latte_step", take_step<true, false>);
static Register registered_macchiato("cpu_macchiato_step", take_step<true, true>);
static Register registered_window("cpu_window_step", take_step<false, true>);

}  // namespace latte

#else  // once per instruction set

#include "rows.h"
#include "step_rows.h"

// What one head computes with, in one piece of memory: rows of whole vectors.
template <class T>
struct Room {
    T *q, *far_q, *logits, *near;              // of the window
    T *p, *k, *v, *far, *decay, *gain, *kept;  // of the latents

    explicit Room(const Step& step) {
        const int64_t K = step.keys.size(3), n = step.sinks(), L = step.mean.size(2);
        const int64_t D = step.v.sizes[2];
        memory = divided<T>({{&q, K},
                             {&far_q, n ? K : 0},
                             {&logits, step.length + n + width<T>},
                             {&near, D},
                             {&p, L + 1},
                             {&k, L},
                             {&v, D},
                             {&far, D},
                             {&decay, L},
                             {&gain, L},
                             {&kept, L}});
    }

private:
    std::vector<T> memory;
};

// The log-masses of one head's latents after they forget. Delayed latents may do so at a token at
// which they read no source.
template <class T>
static void forget(const Step& step, int64_t b, int64_t head, const Room<T>& room) {
    const int64_t L = step.mean.sizes[2];
    T* log_mass = step.log_mass.at<T>() + (b * step.heads() + head) * L;
    logits_of(step.log_decay, b, head, room.decay);
    for (int64_t c = 0; c < L; c += width<T>)
        store(log_mass + c, load(log_mass + c, 1, L - c) + load_all(room.decay + c), L - c);
}

// The log-masses of one head's latents after they read a source of log-weights k. What of the mean
// is replaced by v, and what is kept of it: gain and kept, which sum to 1.
template <class T>
static void gain_mass(const Step& step, int64_t b, int64_t head, const T* k, const Room<T>& room) {
    const int64_t L = step.mean.sizes[2];
    T* log_mass = step.log_mass.at<T>() + (b * step.heads() + head) * L;
    for (int64_t c = 0; c < L; c += width<T>) {
        const V<T> before = load(log_mass + c, 1, L - c);
        const V<T> key = load(k + c, 1, L - c);
        // A source of log-weight -inf is not seen, not even by the empty state.
        const V<T> gap = key - larger(before, all(std::numeric_limits<T>::lowest()));
        const V<T> small = decay(smaller(gap, -gap)).kept, both = small + T(1);
        const Mask<T> below = gap < T(0);
        store(log_mass + c, select(below, before, key) + log_one_plus(small), L - c);
        store_all(room.gain + c, select(below, small, all(T(1))) / both);
        store_all(room.kept + c, select(below, all(T(1)), small) / both);
    }
}

// N vectors of each latent's mean after a source v, and sum_l p[l] mu'[l] of them in y. `size` is
// what is left of a mean.
template <int N, class T>
static void move_columns(const Room<T>& room, const T* p, const T* v, int64_t L, int64_t D,
                         int64_t size, T* mean, T* y) {
    V<T> value[N], sums[N] = {};
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) value[n] = load(v + n * width<T>, 1, size - n * width<T>);
    for (int64_t l = 0; l < L; ++l, mean += D) {
        // From whichever end is nearer: the empty state becomes v itself.
        const bool near = room.gain[l] < T(0.5);
        const T* from = near ? mean : v;
        const T share = near ? room.gain[l] : -room.kept[l];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const int64_t c = n * width<T>, left = N > 1 ? width<T> : size;
            const V<T> change = value[n] - load(mean + c, 1, left);
            const V<T> mu = load(from + c, 1, left) + change * share;
            store(mean + c, mu, left);
            sums[n] = sums[n] + mu * p[l];
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_all(y + n * width<T>, sums[n]);
}

// Latents of one head after a source, if it is real; sum_l p[l] mu'[l] in y.
template <class T>
static void see(const Step& step, int64_t b, int64_t head, bool real, const T* k, const T* v,
                const T* p, const Room<T>& room, T* y) {
    const int64_t L = step.mean.sizes[2], D = step.mean.sizes[3];
    T* mean = step.mean.at<T>() + (b * step.heads() + head) * L * D;
    if (!real) {
        std::fill(y, y + whole<T>(D), T(0));
        return add_rows(p, mean, D, L, y);
    }
    gain_mass(step, b, head, k, room);
    in_columns<T>(D, [&](auto count, int64_t c) {
        move_columns<count>(room, p, v + c, L, D, D - c, mean + c, y + c);
    });
}

// Whether the latents of one head have seen any source.
template <class T>
static bool has_seen(const Step& step, int64_t b, int64_t head) {
    const int64_t L = step.mean.sizes[2];
    const T* log_mass = step.log_mass.at<T>() + (b * step.heads() + head) * L;
    return std::any_of(log_mass, log_mass + L,
                       [](T x) { return x != -std::numeric_limits<T>::infinity(); });
}

// Softmax attention over the ring's slots and the sinks that have left it, in room.near. Returns
// the logsumexp.
template <class S, class T>
static T attend(const Step& step, int64_t b, int64_t head, const Room<T>& room) {
    const int64_t W = step.keys.sizes[2], K = step.keys.sizes[3], D = step.values.sizes[3];
    const int64_t at = b * step.keys.sizes[1] + step.group(head), n = step.sinks();
    const S *keys = step.keys.at<S>() + at * W * K, *values = step.values.at<S>() + at * W * D;
    const int64_t length = step.length;
    // Those that have left it come first.
    const int64_t gone = n ? std::clamp<int64_t>(step.place(b) - W + 1, 0, n) : 0;
    const bool* seen = step.mask ? step.mask.at<bool>() + b * W : nullptr;
    if (seen && !std::memchr(seen, 0, size_t(length))) seen = nullptr;  // all are
    T* logits = room.logits;
    products(room.q, keys, K, length, seen, logits);
    if (gone)
        products(room.far_q, step.sink_keys.at<S>() + at * n * K, K, gone, nullptr,
                 logits + length);
    const T cap = T(step.softcap);
    for (int64_t c = 0; c < length + gone; c += width<T>) {
        V<T> x = load_all(logits + c) * T(step.scale);
        if (step.softcap) x = tanh(x / cap) * cap;
        store_all(logits + c, x);
    }
    for (int64_t w = 0; seen && w < length; ++w)
        if (!seen[w]) logits[w] = -std::numeric_limits<T>::infinity();
    const Span every{0, length + gone}, none{0, 0};
    const Exponentials<T> found = exponentiate(logits, every, none);
    normalise(logits, every, none, found.sum, T(1));
    std::fill(room.near, room.near + whole<T>(D), T(0));
    add_rows(logits, values, D, length, room.near);
    if (gone) add_rows(logits + length, step.sink_values.at<S>() + at * n * D, D, gone, room.near);
    return log_mass_of(found);
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
            gather(ring.at<S>() + (r * W + slot) * n, 1, n, x.data() + r * n);
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
    using T = typename Computed<S>::type;
    const int64_t B = step.keys.sizes[0], G = step.keys.sizes[1], W = step.keys.sizes[2];
    const int64_t K = step.keys.sizes[3], D = step.values.sizes[3], slot = *step.slot.at<int64_t>();
    const int64_t H = step.heads(), L = step.pending ? step.pending.sizes[3] : 0;
    std::vector<T> x(size_t(std::max({K, D, L})));
    auto put = [&](bool real, int64_t n, S* to) {
        if (!real) return void(std::fill(to, to + n, S{}));
        for (int64_t c = 0; c < n; c += width<T>)
            store(to + c, load(x.data() + c, 1, n - c), n - c);
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
    const Room<T> room(step);
    for (int64_t task = begin; task < end; ++task) {
        const int64_t b = task / H, head = task % H;
        T weight = 1, log_mass = 0;
        if (step.window()) {
            row<S>(step.q, b, head, room.q);
            if (step.sinks()) {
                std::copy(room.q, room.q + step.keys.sizes[3], room.far_q);
                rotate(step.sink_cos, step.sink_sin, b, room.far_q);
            }
            rotate(step.cos, step.sin, b, room.q);
            log_mass = attend<S>(step, b, head, room);
        }
        if (step.latents()) {
            logits_of(step.latent_q, b, head, room.p);
            if (step.joint) room.p[0] += log_mass;
            soften(room.p, {0, L + first}, {0, 0}, T(1));
            weight = room.p[0];
            bool real = step.is_real(b);
            const T *key = room.k, *value = room.v;
            if (step.pending) {
                key = left.k.data() + task * L, real = left.real[b];
                value = left.v.data() + (b * G + step.group(head)) * D;
            } else {
                logits_of(step.latent_k, b, head, room.k);
                row<S>(step.v, b, step.group(head), room.v);
            }
            if (step.log_decay && step.is_real(b)) forget(step, b, head, room);
            see(step, b, head, real, key, value, room.p + first, room, room.far);
            if (step.pending && !has_seen<T>(step, b, head)) weight = 1;
        }
        S* out = step.out.at<S>() + task * D;
        for (int64_t c = 0; c < D; c += width<T>) {
            const V<T> far = load_all(room.far + c), near = load_all(room.near + c);
            V<T> y = !step.window() ? far : !step.latents() ? near : far + near * weight;
            store(out + c, y, D - c);
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

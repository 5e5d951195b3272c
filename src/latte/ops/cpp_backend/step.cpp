// One token of decoding: Latte, Latte-Macchiato and the window, their states written in place.
//
//     A' = logaddexp(A, k),  mu' = mu + e^{k-A'} (v - mu),  e^{k-A'} = sigmoid(k - A)
//     where latents forget, A + log_decay in the place of A
//     y = p(0) SWA + sum_{l>=1} p(l) mu'[l],  p = softmax over L + 1 logits     (L without a window)
//
// The window is a ring: the token goes into one slot, and attention runs over all slots that hold
// a token. A task is one head of one row. A token that is not real leaves the latents as they are
// and is a masked slot.
//
// Shapes: B batch, H query heads, G key/value heads, L latents, K key width, D value width, W slots.
#ifndef LATTE_STEP
#define LATTE_STEP

#include "torch_abi.h"

namespace latte {

struct Step {
    Tensor latent_q, latent_k, q, k, v;    // (B,H,L or L+1), (B,H,L), (B,H,K), (B,G,K), (B,G,D)
    Tensor log_mass, mean, log_decay;      // (B,H,L), (B,H,L,D), (B,H,L) or (H,L)
    Tensor keys, values, mask, slot, real; // (B,G,W,K), (B,G,W,D), (B,W), (1,) int64, (B,)
    Tensor cos, sin;                       // (B or 1, 1, 1 or 2, K/2): the last of each row
    double scale = 1.0, softcap = 0.0;     // 0: none
    int64_t length = 0;                    // slots that are used
    Tensor out;                            // (B,H,D)

    bool latents() const { return bool(mean); }
    bool window() const { return bool(keys); }
    int64_t heads() const { return latents() ? mean.sizes[1] : q.sizes[1]; }
    int64_t group(int64_t head) const { return head / (heads() / v.sizes[1]); }
    bool is_real(int64_t b) const { return !real || real.at<bool>()[b * real.strides[0]]; }
};

inline void expect_contiguous(const Tensor& x) {
    int64_t step = 1;
    for (int64_t d = x.dims - 1; d >= 0; step *= x.sizes[d--])
        if (x.sizes[d] > 1 && x.strides[d] != step)
            throw std::runtime_error("latte: a step's state must be contiguous");
}

}  // namespace latte

#define LATTE_FILE "step.cpp"
#include "each_isa.h"

namespace latte {

static void latents(Stack& stack, Step& step) {
    step.log_mass = stack.tensor(), step.mean = stack.tensor();
    step.log_decay = stack.maybe_tensor();
    expect_contiguous(step.log_mass), expect_contiguous(step.mean);
}

static void ring(Stack& stack, Step& step) {
    step.keys = stack.tensor(), step.values = stack.tensor(), step.mask = stack.maybe_tensor();
    step.slot = stack.tensor(), step.cos = stack.maybe_tensor(), step.sin = stack.maybe_tensor();
    expect_contiguous(step.keys), expect_contiguous(step.values);
    if (step.mask) expect_contiguous(step.mask);
    step.length = step.keys.sizes[2];
}

static void finish(Stack& stack, Step& step) {
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
    finish(stack, step);
}

// (latent_q, latent_k, q, k, v, log_mass!, mean!, log_decay?, keys!, values!, mask?!, slot, cos?,
// sin?, real?, scale, softcap) -> y
static void macchiato_step(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Step step;
    step.latent_q = stack.tensor(), step.latent_k = stack.tensor();
    step.q = stack.tensor(), step.k = stack.tensor(), step.v = stack.tensor();
    latents(stack, step);
    ring(stack, step);
    step.real = stack.maybe_tensor();
    step.scale = stack.number(), step.softcap = stack.number();
    finish(stack, step);
}

// (q, k, v, keys!, values!, mask?!, slot, cos?, sin?, real?, scale, softcap, length) -> y
static void window_step(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Step step;
    step.q = stack.tensor(), step.k = stack.tensor(), step.v = stack.tensor();
    ring(stack, step);
    step.real = stack.maybe_tensor();
    step.scale = stack.number(), step.softcap = stack.number();
    step.length = stack.integer();
    finish(stack, step);
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
    for (int64_t j = 0; j < x.sizes[2]; ++j) to[j] = widen(from[j * x.strides[2]]);
}

// Turns the pairs (i, i + K/2) of a query or key by the angles of row b.
template <class T>
static void rotate(const Step& step, int64_t b, T* x) {
    if (!step.cos) return;
    auto last = [b](const Tensor& table) {
        const int64_t row = table.sizes[0] > 1 ? b : 0;
        return table.at<T>() + row * table.strides[0] + (table.sizes[2] - 1) * table.strides[2];
    };
    const T *cos = last(step.cos), *sin = last(step.sin);
    const int64_t half = step.cos.sizes[3], c = step.cos.strides[3], s = step.sin.strides[3];
    for (int64_t j = 0; j < half; ++j) {
        const T first = x[j], second = x[j + half];
        x[j] = first * cos[j * c] - second * sin[j * s];
        x[j + half] = second * cos[j * c] + first * sin[j * s];
    }
}

// Logits become weights that sum to 1: all 0 if every one is -inf.
template <class T>
static void softmax(T* x, int64_t count) {
    T top = x[0], sum = 0;
    for (int64_t j = 1; j < count; ++j) top = x[j] > top ? x[j] : top;
    const bool none = top == -std::numeric_limits<T>::infinity();
    for (int64_t c = 0; c < count; c += width<T>)
        store(x + c, none ? V<T>{} : decay(load(x + c, 1, count - c) - top).kept, count - c);
    for (int64_t j = 0; j < count; ++j) sum += x[j];
    const T share = none ? T(0) : T(1) / sum;
    for (int64_t j = 0; j < count; ++j) x[j] *= share;
}

// Latents of one head after the token; adds weight * sum_l p[l] mu'[l] to y.
template <class T>
static void see(const Step& step, int64_t b, int64_t head, const T* k, const T* v, const T* p, T* y) {
    const int64_t L = step.mean.sizes[2], D = step.mean.sizes[3], at = b * step.heads() + head;
    T *log_mass = step.log_mass.at<T>() + at * L, *mean = step.mean.at<T>() + at * L * D;
    const Tensor& decay = step.log_decay;
    const int64_t rows = decay.dims == 3, *strides = decay.strides + rows;
    const int64_t first = rows * b * decay.strides[0] + head * strides[0];
    const bool real = step.is_real(b);
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

// Adds weight * softmax attention over the ring's slots to y; `logits` has room for them.
template <class S, class T>
static void attend(
    const Step& step, int64_t b, int64_t head, const T* q, T weight, T* logits, T* y) {
    const int64_t W = step.keys.sizes[2], K = step.keys.sizes[3], D = step.values.sizes[3];
    const int64_t at = (b * step.keys.sizes[1] + step.group(head)) * W;
    const S *keys = step.keys.at<S>() + at * K, *values = step.values.at<S>() + at * D;
    const bool* seen = step.mask ? step.mask.at<bool>() + b * W : nullptr;
    for (int64_t w = 0; w < step.length; ++w, keys += K) {
        if (seen && !seen[w]) {
            logits[w] = -std::numeric_limits<T>::infinity();
            continue;
        }
        V<T> sums{};
        for (int64_t c = 0; c < K; c += width<T>)
            sums = sums + load(q + c, 1, K - c) * load(keys + c, 1, K - c);
        const T logit = sum(sums) * T(step.scale);
        logits[w] = step.softcap ? T(step.softcap) * std::tanh(logit / T(step.softcap)) : logit;
    }
    softmax(logits, step.length);
    for (int64_t w = 0; w < step.length; ++w, values += D) {
        if (logits[w] == T(0)) continue;
        const T share = logits[w] * weight;
        for (int64_t c = 0; c < D; c += width<T>)
            store(y + c, load(y + c, 1, D - c) + load(values + c, 1, D - c) * share, D - c);
    }
}

// Puts the token into its slot; padding is zeros there, and masked.
template <class S>
static void take_in(Step& step) {
    const int64_t B = step.keys.sizes[0], G = step.keys.sizes[1], W = step.keys.sizes[2];
    const int64_t K = step.keys.sizes[3], D = step.values.sizes[3], slot = *step.slot.at<int64_t>();
    if (slot < 0 || slot >= W) throw std::runtime_error("latte: a window's slot is out of range");
    std::vector<typename Computed<S>::type> x(size_t(K > D ? K : D));
    for (int64_t b = 0; b < B; ++b) {
        for (int64_t g = 0; g < G; ++g) {
            auto put = [&](Tensor& ring, int64_t n) {
                S* to = ring.at<S>() + ((b * G + g) * W + slot) * n;
                for (int64_t j = 0; j < n; ++j) step.is_real(b) ? narrow(x[j], to[j]) : void(to[j] = S{});
            };
            row<S>(step.k, b, g, x.data()), rotate(step, b, x.data()), put(step.keys, K);
            row<S>(step.v, b, g, x.data()), put(step.values, D);
        }
        if (step.mask) step.mask.at<bool>()[b * W + slot] = step.is_real(b);
    }
}

template <class S>
static void heads(Step& step, int64_t begin, int64_t end) {
    using T = typename Computed<S>::type;
    const int64_t H = step.heads(), D = step.v.sizes[2], first = step.window() ? 1 : 0;
    const int64_t L = step.latents() ? step.mean.sizes[2] : 0;
    std::vector<T> p(size_t(L + 1)), k(size_t(L + 1)), v(static_cast<size_t>(D));
    std::vector<T> y(static_cast<size_t>(D)), q(size_t(step.window() ? step.keys.sizes[3] : 0));
    std::vector<T> logits(static_cast<size_t>(step.length));
    for (int64_t task = begin; task < end; ++task) {
        const int64_t b = task / H, head = task % H;
        std::fill(y.begin(), y.end(), T(0));
        T weight = 1;
        if (step.latents()) {
            row<S>(step.latent_q, b, head, p.data());
            softmax(p.data(), L + first);
            row<S>(step.latent_k, b, head, k.data());
            row<S>(step.v, b, step.group(head), v.data());
            see(step, b, head, k.data(), v.data(), p.data() + first, y.data());
            weight = p[0];
        }
        if (step.window()) {
            row<S>(step.q, b, head, q.data()), rotate(step, b, q.data());
            attend<S>(step, b, head, q.data(), weight, logits.data(), y.data());
        }
        S* out = step.out.at<S>() + task * D;
        for (int64_t c = 0; c < D; c += width<T>) store(out + c, load(y.data() + c, 1, D - c), D - c);
    }
}

template <class S>
static void run_as(Step& step) {
    if (step.window()) take_in<S>(step);
    const int64_t D = step.v.sizes[2], L = step.latents() ? step.mean.sizes[2] : 0;
    const int64_t work = L * (D + 64) + step.length * 2 * D + D;
    parallel(step.v.sizes[0] * step.heads(), 1 + 40000 / work, [&](int64_t begin, int64_t end) {
        heads<S>(step, begin, end);
    });
}

static void run(Step& step) {
    switch (step.v.type()) {
        case Type::F32: return run_as<float>(step);
        case Type::F64: return run_as<double>(step);
        case Type::BF16: return run_as<bf16>(step);
        case Type::F16: return run_as<fp16>(step);
    }
}

#endif

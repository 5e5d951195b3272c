// One token of decoding with kept tokens, in buffers that are written in place
// (latte/ops/kept_step.py):
//
//     y = sum_s p(s) v_s + sum_l p(l) mu[l],  one softmax over window, sinks, kept and latents
//
// The first `count` slots hold kept tokens, in any order. The others are a ring: token s is in slot
// count + s % (window + block - 1). An empty slot has position -1.
//
// An update is due before the first query of each block. Sources leave the window. The largest of
// all that have left are kept, and the latents read the others at once:
//
//     A' = log(e^A + sum_s e^{k_s}),  mu' = (e^A mu + sum_s e^{k_s} v_s) / e^{A'}
//
// with k_s the latent key and the log-decays since the source left the window. First the buffers of
// each group of heads are written, then the heads attend.
//
// Shapes: B batch, H query heads, G key/value heads, L latents, K key width, D value width, M
// slots, n sinks, X sources that are read.
#ifndef LATTE_KEPT_STEP
#define LATTE_KEPT_STEP

#include <memory>
#include <type_traits>

#include "step_checks.h"

namespace latte {

struct KeptStep {
    Tensor latent_q, latent_k, q, k, v;       // (B,H,L+1), (B,H,L), (B,H,K), (B,G,K), (B,G,D)
    Tensor score, log_mass, mean, log_decay;  // (B,G), (B,H,L), (B,H,L,D), (B,H,L) or (H,L)
    Tensor keys, values, scores, positions;   // (B,G,M,K), (B,G,M,D), (B,G,M), (B,G,M) int64
    // Keys, values and latent keys: of any dtype, or rows of 8 bits (mxint8.h).
    Tensor latent_keys, decays;                // (B,H,M,L): sums of log-decays since it left
    Tensor seen, cos, sin, real;               // (B,) int64; (B or 1, 1, 1 or 2, K/2); (B,)
    double scale = 1.0, softcap = 0.0;         // 0: none
    int64_t count = 0, window = 0, block = 0;  // M = count + window + block - 1
    double rise = 0.0;                         // added to a score for each token before
    Tensor sink_keys, sink_values, sink_cos, sink_sin;  // (B,G,n,K), (B,G,n,D); as cos and sin
    Tensor out;                                         // (B,H,D)

    bool packed() const { return keys.dtype == aoti_torch_dtype_uint8(); }
    bool latents() const { return bool(mean); }
    int64_t slots() const { return keys.sizes[2]; }
    int64_t sinks() const { return sink_keys.size(2); }
    int64_t heads() const { return q.sizes[1]; }
    int64_t groups() const { return v.sizes[1]; }
    int64_t share() const { return heads() / groups(); }  // heads of a group
    int64_t place(int64_t b) const { return seen.at<int64_t>()[b]; }
    bool is_real(int64_t b) const { return !real || real.at<bool>()[b * real.strides[0]]; }
    bool is_due(int64_t b) const { return is_real(b) && place(b) % block == 0; }
    int64_t* places(int64_t b, int64_t g) const {
        return positions.at<int64_t>() + (b * groups() + g) * slots();
    }
    // Row of a slot in a tensor (B, heads, M, ...).
    template <class T>
    static T* row_of(const Tensor& x, int64_t b, int64_t head, int64_t slot) {
        return x.at<T>() + ((b * x.sizes[1] + head) * x.sizes[2] + slot) * x.sizes[3];
    }
};

}  // namespace latte

#define LATTE_FILE "kept_step.cpp"
#include "each_isa.h"
#include "maps.h"

namespace latte {

static void check_call(const Expect& expect, const KeptStep& step) {
    const int32_t dtype = step.v.dtype, whole = aoti_torch_dtype_int64();
    expect(step.v, "v", FLOATS, {ANY, ANY, ANY});
    expect(step.q, "q", dtype, {step.v.sizes[0], ANY, ANY});
    const int64_t B = step.v.sizes[0], G = step.v.sizes[1], D = step.v.sizes[2];
    const int64_t H = step.heads(), K = step.q.sizes[2], n = step.sinks();
    expect.that(G >= 1 && H % G == 0, "the heads of v must divide those of the queries");
    expect(step.k, "k", dtype, {B, G, K}), expect(step.score, "score", FLOATS, {B, G});
    const bool packed = step.packed();
    auto rows = [&](const Tensor& x, const char* name, int64_t heads, int64_t slots, int64_t width,
                    int32_t plain) {
        if (packed)
            expect(x, name, step.keys.dtype, {B, heads, slots, width + (width + 31) / 32},
                   Layout::contiguous);
        else expect(x, name, plain, {B, heads, slots, width}, Layout::contiguous);
    };
    rows(step.keys, "keys", G, ANY, K, dtype);
    const int64_t M = step.slots();
    const bool fits = step.count >= 0 && step.count <= M && step.window >= 1 && step.window <= M &&
                      step.block >= 1 && step.block <= M;
    expect.that(fits && M == step.count + step.window + step.block - 1,
                "keys must have count + window + block - 1 slots, with window and block from 1 on");
    rows(step.values, "values", G, M, D, dtype);
    expect(step.scores, "scores", wide(step.v), {B, G, M}, Layout::contiguous);
    expect(step.positions, "positions", whole, {B, G, M}, Layout::contiguous);
    expect(step.seen, "seen", whole, {B}, Layout::contiguous);
    expect.between(step.seen, "seen", 0, std::numeric_limits<int64_t>::max());
    expect(step.real, "real", aoti_torch_dtype_bool(), {B});
    check_angles(expect, step.v, K, step.cos, step.sin);
    expect.together({&step.sink_keys, &step.sink_values}, "sink_keys and sink_values");
    expect(step.sink_keys, "sink_keys", dtype, {B, G, n, K}, Layout::contiguous);
    expect(step.sink_values, "sink_values", dtype, {B, G, n, D}, Layout::contiguous);
    check_angles(expect, step.v, K, step.sink_cos, step.sink_sin);
    expect.together({&step.latent_q, &step.latent_k, &step.log_mass, &step.mean, &step.latent_keys},
                    "latent_q, latent_k, log_mass, mean and latent_keys");
    expect.that(!step.log_decay || step.decays, "log_decay must be given with decays");
    expect.that(!step.decays || step.latents(), "decays must be given with latents");
    if (!step.latents()) return;
    expect(step.mean, "mean", wide(step.v), {B, H, ANY, D}, Layout::contiguous);
    const int64_t L = step.mean.sizes[2];
    expect(step.log_mass, "log_mass", wide(step.v), {B, H, L}, Layout::contiguous);
    expect(step.latent_q, "latent_q", FLOATS, {B, H, L + 1});
    expect(step.latent_k, "latent_k", FLOATS, {B, H, L});
    rows(step.latent_keys, "latent_keys", H, M, L, FLOATS);
    expect(step.decays, "decays", wide(step.v), {B, H, M, L}, Layout::contiguous);
    if (step.log_decay.dims == 2) expect(step.log_decay, "log_decay", FLOATS, {H, L});
    else expect(step.log_decay, "log_decay", FLOATS, {B, H, L});
}

// (latent_q?, latent_k?, q, k, v, score, log_mass?!, mean?!, log_decay?, keys!, values!, scores!,
// positions!, latent_keys?!, decays?!, seen, cos?, sin?, real?, scale, softcap, count, window,
// block, rise, sink_keys?!, sink_values?!, sink_cos?, sink_sin?) -> y
void take_kept_step(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    KeptStep step;
    step.latent_q = stack.maybe_tensor(), step.latent_k = stack.maybe_tensor();
    step.q = stack.tensor(), step.k = stack.tensor(), step.v = stack.tensor();
    step.score = stack.tensor();
    step.log_mass = stack.maybe_tensor(true), step.mean = stack.maybe_tensor(true);
    step.log_decay = stack.maybe_tensor();
    step.keys = stack.tensor(true), step.values = stack.tensor(true);
    step.scores = stack.tensor(true), step.positions = stack.tensor(true);
    step.latent_keys = stack.maybe_tensor(true), step.decays = stack.maybe_tensor(true);
    step.seen = stack.tensor();
    step.cos = stack.maybe_tensor(), step.sin = stack.maybe_tensor();
    step.real = stack.maybe_tensor();
    step.scale = stack.number(), step.softcap = stack.number();
    step.count = stack.integer(), step.window = stack.integer(), step.block = stack.integer();
    step.rise = stack.number();
    step.sink_keys = stack.maybe_tensor(true), step.sink_values = stack.maybe_tensor(true);
    step.sink_cos = stack.maybe_tensor(), step.sink_sin = stack.maybe_tensor();
    check_call(Expect("cpu_kept_step"), step);
    step.out = Tensor::empty({step.v.sizes[0], step.heads(), step.v.sizes[2]}, step.v.dtype);
    LATTE_CHOOSE(run)(step);
    stack.give(step.out);
}

static Register registered_kept("cpu_kept_step", take_kept_step);

}  // namespace latte

#else  // once per instruction set

#include "rows.h"
#include "step_rows.h"
#include "mxint8.h"

// Calls work(R{}), R the elements of the rows of a tensor of slots.
template <class Work>
LATTE_INLINE void by_rows(const Tensor& x, const Work& work) {
    if (x.dtype == aoti_torch_dtype_uint8()) work(mxint8{});
    else by_dtype(x.type(), work);
}

// Applies a token's decay to a group's latents, and to the sources that have left the window.
template <class T>
static void forget(const KeptStep& step, int64_t b, int64_t g, T* decay) {
    using Numbers = typename Raw<T>::numbers;
    const int64_t L = step.mean.sizes[2], last = step.place(b) - step.window;
    const int64_t* places = step.places(b, g);
    std::vector<int64_t> left;
    for (int64_t slot = 0; slot < step.slots(); ++slot)
        if (places[slot] >= 0 && places[slot] < last) left.push_back(slot);
    for (int64_t head = g * step.share(); head < (g + 1) * step.share(); ++head) {
        logits_of(step.log_decay, b, head, decay);
        T* log_mass = step.log_mass.at<T>() + (b * step.heads() + head) * L;
        for (int64_t l = 0; l < L; ++l) log_mass[l] += decay[l];
        T* sums = KeptStep::row_of<T>(step.decays, b, head, 0);
        int64_t l = 0;
        for (; l + half_width<T> <= L; l += half_width<T>) {
            Numbers more, sum;
            std::memcpy(&more, decay + l, sizeof more);
            for (int64_t slot : left) {
                T* at = sums + slot * L + l;
                std::memcpy(&sum, at, sizeof sum);
                sum += more;
                std::memcpy(at, &sum, sizeof sum);
            }
        }
        for (; l < L; ++l)
            for (int64_t slot : left) sums[slot * L + l] += decay[l];
    }
}

// The latents of a group's heads read the sources in these slots.
template <class R, class T>
static void read_sources(const KeptStep& step, int64_t b, int64_t g,
                         const std::vector<int64_t>& slots) {
    const int64_t L = step.mean.sizes[2], D = step.mean.sizes[3], X = int64_t(slots.size());
    const int64_t room = whole<T>(1 + X);
    T *values, *logits, *moved;
    const std::vector<T> memory =
        divided<T>({{&values, X * D}, {&logits, L * room}, {&moved, std::max(L, D)}});
    for (int64_t x = 0; x < X; ++x)
        read_row(KeptStep::row_of<R>(step.values, b, g, slots[size_t(x)]), D, values + x * D);
    for (int64_t head = g * step.share(); head < (g + 1) * step.share(); ++head) {
        T* log_mass = step.log_mass.at<T>() + (b * step.heads() + head) * L;
        T* mean = step.mean.at<T>() + (b * step.heads() + head) * L * D;
        // For each latent: the earlier state, then the sources.
        for (int64_t l = 0; l < L; ++l) logits[l * room] = log_mass[l];
        for (int64_t x = 0; x < X; ++x) {
            const int64_t at = (b * step.heads() + head) * step.slots() + slots[size_t(x)];
            by_rows(step.latent_keys, [&](auto r) {
                using Row = decltype(r);
                read_row(KeptStep::row_of<Row>(step.latent_keys, b, head, slots[size_t(x)]), L,
                         moved);
            });
            const T* sums = step.decays ? step.decays.at<T>() + at * L : nullptr;
            for (int64_t l = 0; l < L; ++l)
                logits[l * room + 1 + x] = moved[l] + (sums ? sums[l] : T(0));
        }
        for (int64_t l = 0; l < L; ++l, mean += D) {
            T* p = logits + l * room;
            const Exponentials<T> found = exponentiate(p, {0, 1 + X}, {0, 0});
            normalise(p, {0, 1 + X}, {0, 0}, found.sum, T(1));
            log_mass[l] = log_mass_of(found);
            for (int64_t c = 0; c < D; c += width<T>)
                store_all(moved + c, load(mean + c, 1, D - c) * p[0]);
            add_rows(p + 1, values, D, X, moved);
            std::copy(moved, moved + D, mean);
        }
    }
}

// A source of one group moves to another slot.
template <class T>
static void move_source(const KeptStep& step, int64_t b, int64_t g, int64_t from, int64_t to) {
    auto copy = [&](const Tensor& x, int64_t head) {
        const int64_t bytes = x.sizes[3] * x.bytes_each();
        char* rows = x.data + (b * x.sizes[1] + head) * x.sizes[2] * bytes;
        std::memcpy(rows + to * bytes, rows + from * bytes, size_t(bytes));
    };
    copy(step.keys, g), copy(step.values, g);
    for (int64_t head = g * step.share(); head < (g + 1) * step.share(); ++head) {
        if (step.latent_keys) copy(step.latent_keys, head);
        if (step.decays) copy(step.decays, head);
    }
    T* scores = step.scores.at<T>() + (b * step.groups() + g) * step.slots();
    scores[to] = scores[from], step.places(b, g)[to] = step.places(b, g)[from];
}

// Sources leave the window. Those with the largest scores are kept; of equal scores, the later.
template <class R, class T>
static void update(const KeptStep& step, int64_t b, int64_t g) {
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    const int64_t last = step.place(b) - step.window;
    int64_t* places = step.places(b, g);
    T* scores = step.scores.at<T>() + (b * step.groups() + g) * step.slots();
    std::vector<int64_t> stay, go;
    auto clear = [&](int64_t slot) { places[slot] = -1, scores[slot] = lowest; };
    for (int64_t slot = 0; slot < step.slots(); ++slot) {
        const bool recent = slot >= step.count;
        if (places[slot] < 0 || (recent && places[slot] > last)) continue;
        if (recent && places[slot] < step.sinks()) clear(slot);
        else (scores[slot] > lowest ? stay : go).push_back(slot);
    }
    const auto better = [&](int64_t one, int64_t other) {
        return scores[one] > scores[other] ||
               (scores[one] == scores[other] && places[one] > places[other]);
    };
    if (int64_t(stay.size()) > step.count) {
        const auto end = stay.begin() + step.count;
        std::nth_element(stay.begin(), end, stay.end(), better);
        go.insert(go.end(), end, stay.end());
        stay.erase(end, stay.end());
    }
    if (step.latents() && !go.empty()) read_sources<R, T>(step, b, g, go);
    for (int64_t slot : go) clear(slot);
    int64_t to = 0;
    for (int64_t slot : stay) {
        if (slot < step.count) continue;
        while (places[to] >= 0) ++to;
        move_source<T>(step, b, g, slot, to);
        clear(slot);
    }
}

// Puts the token into its slot of the ring, and among the sinks if it is one.
template <class S, class R, class T>
static void put(const KeptStep& step, int64_t b, int64_t g, T* x) {
    const int64_t place = step.place(b), n = step.sinks(), L = step.mean.size(2);
    const int64_t K = step.k.sizes[2], D = step.v.sizes[2];
    const int64_t slot = step.count + place % (step.slots() - step.count);
    row<S>(step.k, b, g, x), rotate(step.cos, step.sin, b, x);
    if (place < n) write_row<S>(x, K, KeptStep::row_of<S>(step.sink_keys, b, g, place));
    write_row<S>(x, K, KeptStep::row_of<R>(step.keys, b, g, slot));
    row<S>(step.v, b, g, x);
    if (place < n) write_row<S>(x, D, KeptStep::row_of<S>(step.sink_values, b, g, place));
    write_row<S>(x, D, KeptStep::row_of<R>(step.values, b, g, slot));
    const int64_t at = (b * step.groups() + g) * step.slots() + slot;
    T score = number_at<T>(step.score, b * step.score.strides[0] + g * step.score.strides[1]);
    if (step.rise != 0) score += T(step.rise * double(place));
    step.scores.at<T>()[at] = score == score ? score : -std::numeric_limits<T>::infinity();
    step.positions.at<int64_t>()[at] = place;
    if (!step.latents()) return;
    for (int64_t head = g * step.share(); head < (g + 1) * step.share(); ++head) {
        logits_of(step.latent_k, b, head, x);
        by_rows(step.latent_keys, [&](auto r) {
            using Row = decltype(r);
            write_row<S>(x, L, KeptStep::row_of<Row>(step.latent_keys, b, head, slot));
        });
        if (!step.decays) continue;
        T* sums = KeptStep::row_of<T>(step.decays, b, head, slot);
        std::fill(sums, sums + L, T(0));
    }
}

// Writes the buffers of one group for the token.
template <class S, class R, class T>
static void take_in(const KeptStep& step, int64_t b, int64_t g, T* x) {
    if (!step.is_real(b)) return;
    if (step.log_decay) forget(step, b, g, x);
    if (step.is_due(b)) update<R, T>(step, b, g);
    put<S, R>(step, b, g, x);
}

// Number of heads that attend together and so read keys and values once. Their sums stay in
// registers, of which AVX-512 has more.
constexpr int TOGETHER = LATTE_WIDTH == 64 ? 3 : 1;

// What one head computes with.
template <class T>
struct Head {
    T *q, *far_q, *logits, *y;
};

// products() of several heads with the same rows, written to their logits.
template <int heads, class R, class T>
static void products_of(const Head<T>* each, const R* rows, int64_t size, int64_t count,
                        const bool* wanted) {
    using Numbers = typename Raw<T>::numbers;
    constexpr int64_t together = half_width<T>, lane = lane_width<T>, groups = together / lane;
    for (int64_t j = 0; j < count; j += together) {
        if (!std::memchr(wanted + j, 1, size_t(std::min(together, count - j)))) continue;
        Numbers found[heads][groups];
        for (int64_t g = 0; g < groups; ++g) {
            V<T> sums[heads][lane];
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
                for (int64_t i = 0; i < lane; ++i) sums[h][i] = V<T>{};
            const int64_t at = j + g * lane;
            const R* row[lane];
#pragma GCC unroll 4
            for (int64_t i = 0; i < lane; ++i)
                row[i] = rows + std::min(at + i, count - 1) * row_size<R>(size);
            for (int64_t c = 0; c < size; c += width<T>) {
                V<T> x[heads];
#pragma GCC unroll 4
                for (int h = 0; h < heads; ++h) x[h] = load_all(each[h].q + c);
#pragma GCC unroll 4
                for (int64_t i = 0; i < lane; ++i) {
                    const V<T> key = load_row<T>(row[i], size, c);
#pragma GCC unroll 4
                    for (int h = 0; h < heads; ++h) sums[h][i] = sums[h][i] + x[h] * key;
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h) {
                Numbers halves[lane];
#pragma GCC unroll 4
                for (int64_t i = 0; i < lane; ++i) halves[i] = sums[h][i].low + sums[h][i].high;
                found[h][g] = fold<T, 1, lane>(halves);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h) {
            const Numbers every = fold<T, lane, together>(found[h]);
            std::memcpy(each[h].logits + j, &every, sizeof every);
        }
    }
}

// add_rows() of several heads with the same rows, from 0 on. Only wanted rows are read.
template <int heads, class R, class T>
static void add_rows_of(const Head<T>* each, const R* rows, int64_t size, int64_t count,
                        const bool* wanted) {
    in_columns<T>(size, [&](auto vectors_of, int64_t c) {
        constexpr int N = vectors_of > 2 ? 2 : vectors_of;
        for (int part = 0; part < vectors_of; part += N, c += N * width<T>) {
            V<T> sums[heads][N];
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sums[h][n] = V<T>{};
            const R* at = rows;
            for (int64_t j = 0; j < count; ++j, at += row_size<R>(size)) {
                if (!wanted[j]) continue;
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    const V<T> value = load_row<T>(at, size, c + n * width<T>);
#pragma GCC unroll 4
                    for (int h = 0; h < heads; ++h)
                        sums[h][n] = sums[h][n] + value * each[h].logits[j];
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) store_all(each[h].y + c + n * width<T>, sums[h][n]);
        }
    });
}

// Calls work(N) with the number of heads as a constant.
template <class Work>
LATTE_INLINE void of_heads(int64_t count, const Work& work) {
    if (count == 1) return work(std::integral_constant<int, 1>());
    if constexpr (TOGETHER > 1) {
        if (count == 2) work(std::integral_constant<int, 2>());
        else work(std::integral_constant<int, 3>());
    }
}

// One softmax of some heads of a group over its slots, the sinks that have left, and the latents.
template <class S, class R, class T>
static void attend(const KeptStep& step, int64_t b, int64_t first, int64_t count, const bool* seen,
                   const Head<T>* heads) {
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    const int64_t M = step.slots(), K = step.q.sizes[2], D = step.v.sizes[2], n = step.sinks();
    const int64_t L = step.mean.size(2), g = first / step.share();
    const int64_t place = step.place(b), begun = place - place % step.block - step.window;
    const int64_t gone = std::clamp<int64_t>(begun + 1, 0, n), exact = M + gone;
    const R* keys = KeptStep::row_of<R>(step.keys, b, g, 0);
    const R* values = KeptStep::row_of<R>(step.values, b, g, 0);
    of_heads(count, [&](auto together) { products_of<together>(heads, keys, K, M, seen); });
    // Latents that have read no source have no weight.
    const T* masses = step.log_mass.at<T>() + (b * step.heads() + g * step.share()) * L;
    const bool late =
        std::any_of(masses, masses + step.share() * L, [](T x) { return x != lowest; });
    const int64_t total = exact + (late ? L : 0);
    for (int64_t h = 0; h < count; ++h) {
        T* logits = heads[h].logits;
        if (gone)
            products(heads[h].far_q, KeptStep::row_of<S>(step.sink_keys, b, g, 0), K, gone, nullptr,
                     logits + M);
        const T cap = T(step.softcap);
        for (int64_t c = 0; c < exact; c += width<T>) {
            V<T> x = load_all(logits + c) * T(step.scale);
            if (step.softcap) x = tanh(x / cap) * cap;
            store_all(logits + c, x);
        }
        for (int64_t slot = 0; slot < M; ++slot)
            if (!seen[slot]) logits[slot] = lowest;
        if (late) {
            // Subtracting the first logit here has the effect of adding it to all exact keys.
            T* own = heads[h].y;
            logits_of(step.latent_q, b, first + h, own);
            for (int64_t l = 0; l < L; ++l) logits[exact + l] = own[1 + l] - own[0];
        }
        soften(logits, {0, total}, {0, 0}, T(1));
    }
    of_heads(count, [&](auto together) { add_rows_of<together>(heads, values, D, M, seen); });
    for (int64_t h = 0; h < count; ++h) {
        if (gone)
            add_rows(heads[h].logits + M, KeptStep::row_of<S>(step.sink_values, b, g, 0), D, gone,
                     heads[h].y);
        if (late)
            add_rows(heads[h].logits + exact,
                     step.mean.at<T>() + (b * step.heads() + first + h) * L * D, D, L, heads[h].y);
        S* out = step.out.at<S>() + (b * step.heads() + first + h) * D;
        for (int64_t c = 0; c < D; c += width<T>) store(out + c, load_all(heads[h].y + c), D - c);
    }
}

template <class S, class Row, class T>
static void attend_parts(const KeptStep& step, int64_t begin, int64_t end) {
    const int64_t K = step.q.sizes[2], D = step.v.sizes[2], M = step.slots(), n = step.sinks();
    const int64_t L = step.mean.size(2), R = step.share(), parts = (R + TOGETHER - 1) / TOGETHER;
    Head<T> heads[TOGETHER];
    std::vector<T> memory[TOGETHER];
    for (int64_t h = 0; h < std::min<int64_t>(R, TOGETHER); ++h)
        memory[h] = divided<T>({{&heads[h].q, K},
                                {&heads[h].far_q, n ? K : 0},
                                {&heads[h].logits, M + n + L + 2 * width<T>},
                                {&heads[h].y, std::max(D, L + 1)}});
    const std::unique_ptr<bool[]> seen(new bool[size_t(M)]);
    for (int64_t task = begin; task < end; ++task) {
        const int64_t b = task / (parts * step.groups()), g = task / parts % step.groups();
        const int64_t part = task % parts, first = g * R + part * R / parts;
        const int64_t count = g * R + (part + 1) * R / parts - first, *places = step.places(b, g);
        for (int64_t slot = 0; slot < M; ++slot) seen[slot] = places[slot] >= 0;
        for (int64_t h = 0; h < count; ++h) {
            row<S>(step.q, b, first + h, heads[h].q);
            if (n) {
                std::copy(heads[h].q, heads[h].q + K, heads[h].far_q);
                rotate(step.sink_cos, step.sink_sin, b, heads[h].far_q);
            }
            rotate(step.cos, step.sin, b, heads[h].q);
        }
        attend<S, Row>(step, b, first, count, seen.get(), heads);
    }
}

template <class S, class Row>
static void run_as(const KeptStep& step) {
    using T = typename Computed<S>::type;
    const int64_t B = step.v.sizes[0], G = step.groups(), K = step.q.sizes[2], D = step.v.sizes[2];
    const int64_t L = step.mean.size(2), R = step.share(), M = step.slots();
    bool due = false;
    for (int64_t b = 0; b < B; ++b) due = due || step.is_due(b);
    const int64_t moves = due ? step.block * (K + D + R * L * (D + 16)) : 0;
    parallel(B * G, 1 + 40000 / (1 + K + D + R * L * (step.decays ? M : 1) + moves),
             [&](int64_t begin, int64_t end) {
                 T* x;
                 const std::vector<T> memory = divided<T>({{&x, std::max({K, D, L})}});
                 for (int64_t task = begin; task < end; ++task)
                     take_in<S, Row>(step, task / G, task % G, x);
             });
    const int64_t work = std::min<int64_t>(R, TOGETHER) * (M + step.sinks() + L) * (K + D);
    parallel(B * G * ((R + TOGETHER - 1) / TOGETHER), 1 + 40000 / (1 + work),
             [&](int64_t begin, int64_t end) { attend_parts<S, Row, T>(step, begin, end); });
}

static void run(const KeptStep& step) {
    by_dtype(step.v.type(), [&](auto s) {
        if (step.packed()) run_as<decltype(s), mxint8>(step);
        else run_as<decltype(s), decltype(s)>(step);
    });
}

#endif

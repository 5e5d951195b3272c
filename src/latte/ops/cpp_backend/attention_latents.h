// The latents of a head: runs with one reference, their state, and the backward pass.

#include "attention_window.h"

struct LatentHead : WindowHead {
    using WindowHead::WindowHead;

    // The state before the first token of a sequence. In a later part it is empty.
    void begin_task(const HeadTask& given) {
        task = given;
        low = op.tail_k ? -op.tail() : 0;
        if (late) find_heard();
        for (int64_t l = 0; l < Lp; ++l) state.top[l] = lowest, state.mass[l] = 0;
        clear(state.sum, Lp * Dp);
        if (!op.log_mass || task.from) return;  // also if there are no latents
        const int64_t at = (task.n * op.heads() + task.h) * L;
        for (int64_t l = 0; l < L; ++l) {
            state.top[l] = op.log_mass.at<T>()[at + l];
            if (state.top[l] == lowest) continue;
            // Without a finite log-mass there is no mean: its queries and the next state are NaN.
            const bool finite = state.top[l] < std::numeric_limits<T>::infinity();
            state.mass[l] = finite ? T(1) : std::numeric_limits<T>::quiet_NaN();
            copy(state.sum + l * Dp, op.mean.at<T>() + (at + l) * D, D);
        }
    }

    // The rows of a chunk whose latents receive pending sources: these are from before the first
    // token.
    int64_t pending_rows(int64_t chunk, int64_t rows) const {
        return least(rows, most(0, delay - chunk * TOKENS));
    }

    // The sources that the latents receive at a chunk's tokens. They come from x or, before its
    // first token, from `pending`. They are rows of T, with zeros up to n. Where there is no
    // source, a row may hold any numbers.
    void take_sources(const Tensor& x, const Tensor& pending, int64_t head, int64_t chunk,
                      int64_t rows, T* to, int64_t n) {
        const int64_t first = chunk * TOKENS - delay, old = pending_rows(chunk, rows);
        if (old && pending) take(pending, task.n, delay + first, head, old, to, n);
        if (old == rows) return;
        take(x, task.row, task.begin + first + old, head, rows - old, to + old * n, n);
    }

    // The latents' logits of a chunk, -inf where a source does not count, and their log-decays.
    void load_logits(int64_t chunk, int64_t rows) {
        const int64_t token = task.begin + chunk * TOKENS;
        take_sources(op.latent_k, op.pending_k, task.h, chunk, rows, keys, Lp);
        for (int64_t i = 0; i < rows; ++i) {
            const bool seen = source(chunk * TOKENS - delay + i);
            for (int64_t l = seen ? L : 0; l < Lp; ++l) keys[i * Lp + l] = lowest;
        }
        if (forgets) take(op.log_decay, task.row, token, task.h, rows, decays, Lp);
    }

    // Moves the state to another reference, `to` or the present one if that is larger.
    void refer(const T* to) {
        for (int64_t l = 0; l < L; ++l)
            if (to[l] > state.top[l]) rescale(l, to[l], std::exp(state.top[l] - to[l]));
    }

    void rescale(int64_t l, T to, T factor) {
        state.top[l] = to, state.mass[l] *= factor;
        for (int64_t d = 0; d < Dp; ++d) state.sum[l * Dp + d] *= factor;
    }

    // The state after a run: the log-decay is added to its reference, rounded to the nearest
    // number. The rounding error goes into the sums.
    void forget(const T* decay) {
        for (int64_t l = 0; l < L; ++l) {
            if (decay[l] == T(0) || state.top[l] == lowest) continue;
            const double to = double(state.top[l]) + double(decay[l]);
            rescale(l, T(to), T(std::exp(to - double(T(to)))));
        }
    }

    // The log-decays of latents l ... summed from the start of a run through row i.
    V<T> forget_at(int64_t begin, int64_t i, int64_t l) {
        V<T> sum = load_all(decays + i * Lp + l);
        if (i > begin) sum = sum + load_all(forgotten + (i - 1) * Lp + l);
        store_all(forgotten + i * Lp + l, sum);
        return sum;
    }

    // Where a run that begins at row `begin` ends. The state moves to its references; the largest
    // keys in it are in tops.
    int64_t find_end(int64_t begin, int64_t rows) {
        for (int64_t i = begin; i < rows; ++i) {
            bool beyond = false;
            for (int64_t l = 0; l < Lp; l += W) {
                V<T> key = load_all(keys + i * Lp + l), limit = all(T(REACH));
                if (forgets) {
                    V<T> sum = forget_at(begin, i, l);
                    key = key - sum, limit = select(sum < T(0), all(T(FORGETTING_REACH)), limit);
                }
                beyond |= any(load_all(state.top + l) + limit < key);
                store_all(at_row + l, key);
            }
            if (i == begin) refer(at_row);
            else if (beyond) return i;
            for (int64_t l = 0; l < Lp; l += W) {
                V<T> key = load_all(at_row + l);
                store_all(tops + l, i == begin ? key : larger(load_all(tops + l), key));
            }
        }
        return rows;
    }

    // e, alpha and p / alpha of a run; alpha and the ratio are 0 in latents that have seen nothing.
    void scale_keys(const LatentRun& run) {
        for (int64_t l = 0; l < Lp; l += W) {
            V<T> reference = load_all(run.before.top + l), mass = load_all(run.before.mass + l);
            reference = select(all(lowest) < reference, reference, V<T>{});
            for (int64_t i = run.begin; i < run.end; ++i) {
                V<T> x = load_all(keys + i * Lp + l) - reference;  // exact for large logits
                if (forgets) x = x - load_all(forgotten + i * Lp + l);
                x = decay(x).kept;
                mass = mass + x;
                V<T> share = load_all(p + i * Lq + W + l) / mass;
                store_all(e + i * Lp + l, x);
                store_all(alpha + i * Lp + l, mass);
                store_all(ratio + i * Lp + l, select(all(T(0)) < mass, share, mass));
            }
        }
    }

    // The next run of a chunk, with the state moved to its references.
    LatentRun next_run(int64_t begin, int64_t rows) {
        const int64_t end = find_end(begin, rows);
        return {begin, end, state, forgotten + (end - 1) * Lp};
    }

    // Adds the run's sources to the state.
    void take_in(const LatentRun& run, const T* v) {
        product(state.sum, Dp, true, L, Dp, e + run.begin * Lp, int64_t(1), Lp, v + run.begin * Dp,
                Dp, run.end - run.begin);
        copy(state.mass, alpha + (run.end - 1) * Lp, L);
        refer(tops);
        if (forgets) forget(run.forgotten);
    }

    // Adds sum_l ratio_t[l] e_s[l] to x[t][s] for the sources s <= t of a run.
    void add_scores(const LatentRun& run, T* x, int64_t ldx) {
        turn<T>(e, Lp, run.begin, run.end, Lp, e_panels);
        for (int64_t i = run.begin; i < run.end; i += ROWS) {
            const int64_t count = least(ROWS, run.end - i);
            for (int64_t c = run.begin / W * W; c < i + count; c += W) {
                const T *rows = ratio + i * Lp, *panel = e_panels + c * Lp;
                if (c >= run.begin && c + W <= i + 1) {
                    tile(count, x + i * ldx + c, ldx, true, rows, Lp, 1, panel, W, L);
                    continue;
                }
                alignas(64) T some[ROWS * W];
                tile(count, some, W, false, rows, Lp, 1, panel, W, L);
                for (int64_t m = 0; m < count; ++m) {
                    T* to = x + (i + m) * ldx + c;
                    V<T> seen = within(load_all(some + m * W), V<T>{}, c, run.begin, i + m + 1);
                    store_all(to, load_all(to) + seen);
                }
            }
        }
    }

    // Whether the sequence's state holds anything, else the first token that feeds its latents.
    void find_heard() {
        heard = 0;
        const int64_t count = op.heads() * L;
        for (int64_t i = 0; op.log_mass && i < count; ++i)
            if (op.log_mass.at<T>()[task.n * count + i] != lowest) return;
        while (heard < task.count && !source(heard - delay)) ++heard;
    }

    // Adds to the outputs the sources that delayed latents received in a run, up to a query's own
    // source.
    void with_late(const LatentRun& run, bool strange) {
        const int64_t begin = run.begin, together = strange ? 1 : ROWS;
        for (int64_t d = 0; d < Dp; d += W)
            for (int64_t i = begin; i < run.end; i += together) {
                const int64_t count = least(together, run.end - i);
                tile(count, out + i * Dp + d, Dp, true, scores + i * TOKENS + begin, TOKENS, 1,
                     late_v + begin * Dp + d, Dp, i + count - begin);
            }
    }

    // The state kept at the beginning of a segment, and the inverse.
    void take_kept(int64_t segment) {
        const int64_t at = kept_at(segment);
        copy(state.top, op.kept_top.at<T>() + at, L);
        copy(state.mass, op.kept_mass.at<T>() + at, L);
        copy_rows(state.sum, Dp, op.kept_sum.at<T>() + at * D, D, L, D);
    }
    void put_kept(int64_t segment) {
        const int64_t at = kept_at(segment);
        copy(op.kept_top.at<T>() + at, state.top, L);
        copy(op.kept_mass.at<T>() + at, state.mass, L);
        copy_rows(op.kept_sum.at<T>() + at * D, D, state.sum, Dp, L, D);
    }

    // Takes the sources of a chunk into the state, and calls work(run) before each of its runs.
    template <class Work>
    void walk_chunk(int64_t c, const Work& work) {
        const int64_t rows = rows_of(c);
        load_logits(c, rows);
        load_values(c, rows, out);
        for (int64_t begin = 0; begin < rows;) {
            const LatentRun run = next_run(begin, rows);
            work(run);
            scale_keys(run);
            take_in(run, out);
            begin = run.end;
        }
    }

    // The runs of a segment and the states before them: a second forward pass from the saved state.
    void walk_segment(int64_t segment) {
        const int64_t one = 3 * Lp + Lp * Dp;
        take_kept(segment);
        runs.clear(), saved.clear();
        const int64_t first = segment * (SEGMENT / TOKENS);
        const int64_t stop = least(first + SEGMENT / TOKENS, (task.count + TOKENS - 1) / TOKENS);
        for (int64_t c = first; c < stop; ++c)
            walk_chunk(c, [&](LatentRun run) {
                saved.insert(saved.end(), state.top, state.top + Lp);
                saved.insert(saved.end(), state.mass, state.mass + Lp);
                saved.insert(saved.end(), state.sum, state.sum + Lp * Dp);
                saved.insert(saved.end(), run.forgotten, run.forgotten + Lp);
                run.begin += c * TOKENS, run.end += c * TOKENS;
                runs.push_back(run);
            });
        for (size_t r = 0; r < runs.size(); ++r) {
            T* held = saved.data() + int64_t(r) * one;
            runs[r].before = {held, held + Lp, held + 2 * Lp};
            runs[r].forgotten = held + 2 * Lp + Lp * Dp;
        }
    }

    // The values that the latents receive at a chunk's tokens, zeros where there is no source.
    void load_values(int64_t chunk, int64_t rows, T* to) {
        take_sources(op.v, op.pending_v, task.g, chunk, rows, to, Dp);
        for (int64_t i = 0; i < rows; ++i)
            if (!source(chunk * TOKENS - delay + i)) clear(to + i * Dp, Dp);
    }

    // R and its scalar from the gradient of the state after the last token, relative to its top.
    void begin_reverse() {
        clear(reverse, Lp * Dp);
        const Tensor &dmass = op.dlast_mass, &dmean = op.dlast_mean;
        for (int64_t l = 0; l < Lp; ++l) {
            scalar[l] = 0;
            if (l >= L || state.mass[l] == T(0)) continue;
            const T mass = state.mass[l];
            const T* from = dmean.at<T>() + task.n * dmean.strides[0] + task.h * dmean.strides[1] +
                            l * dmean.strides[2];
            for (int64_t d = 0; d < D; ++d) {
                reverse[l * Dp + d] = from[d * dmean.strides[3]] / mass;
                scalar[l] += reverse[l * Dp + d] * (state.sum[l * Dp + d] / mass);
            }
            scalar[l] -= dmass.at<T>()[task.n * dmass.strides[0] + task.h * dmass.strides[1] +
                                       l * dmass.strides[2]] /
                         mass;
        }
    }

    // Makes R and its scalar relative to the reference of an earlier run, in place of `from`.
    void refer_back(const T* from, const LatentRun& run) {
        for (int64_t l = 0; l < L; ++l) {
            const T to = run.before.top[l], decay = run.forgotten[l];
            if (from[l] == to && (decay == T(0) || to == lowest)) continue;
            const T factor = T(std::exp(double(to) - double(from[l]) + double(decay)));
            scalar[l] *= factor;
            for (int64_t d = 0; d < Dp; ++d) reverse[l * Dp + d] *= factor;
        }
    }

    // The gradients of an empty initial state are zero.
    void end_state() {
        const int64_t at = (task.n * op.heads() + task.h) * L;
        for (int64_t l = 0; l < L; ++l) {
            T* dmean = op.dmean.at<T>() + (at + l) * D;
            const T* mean = op.mean.at<T>() + (at + l) * D;
            const T first = op.log_mass.at<T>()[at + l];
            const T mass = first == lowest ? T(0) : std::exp(first - top[size_t(l)]);
            T total = 0;
            for (int64_t d = 0; d < D; ++d) {
                dmean[d] = mass == T(0) ? T(0) : mass * reverse[l * Dp + d];
                if (mass != T(0)) total += dmean[d] * mean[d];
            }
            op.dlog_mass.at<T>()[at + l] = mass == T(0) ? T(0) : total - mass * scalar[l];
        }
    }

    // Values of delayed sources, and <dy_t, v_s> of those that a query's latents have received.
    void load_late(int64_t c, int64_t rows) {
        load_values(c, rows, late_v);
        turn<T>(late_v, Dp, 0, rows, D, late_panels);
        for (int64_t s = 0; s < rows; s += W)
            for (int64_t i = s / ROWS * ROWS; i < rows; i += ROWS)
                tile(least(ROWS, rows - i), late_pairs + i * TOKENS + s, TOKENS, false, dy + i * Dp,
                     Dp, 1, late_panels + s * D, W, D);
        clear(scores, rows * TOKENS);
    }

    // Gradients of delayed values through the scores, from the queries after each.
    void to_late(int64_t rows) {
        for (int64_t d = 0; d < Dp; d += W)
            for (int64_t i = 0; i < rows; i += ROWS)
                tile(least(ROWS, rows - i), late_dv + i * Dp + d, Dp, false,
                     scores + i * TOKENS + i, 1, TOKENS, dy + i * Dp + d, Dp, rows - i);
    }

    // Adds the gradients of delayed sources to their chunks of keys, or to the pending sources.
    void put_late(int64_t c, int64_t rows) {
        const int64_t first = c * TOKENS - delay, old = pending_rows(c, rows);
        if (old && op.pending_k) {
            put(op.dpending_k, task.n, delay + first, task.h, old, dkeys, Lp);
            put(op.dpending_v, task.n, delay + first, task.h, old, late_dv, Dp);
        }
        for (int64_t i = old; i < rows; ++i) {
            const int64_t token = first + i;
            T* to = slot(token / TOKENS).dv + token % TOKENS * Dp;
            for (int64_t d = 0; d < Dp; d += W)
                store_all(to + d, load_all(to + d) + load_all(late_dv + i * Dp + d));
        }
        if (old < rows)
            put(op.dlatent_k, task.row, task.begin + first + old, task.h, rows - old,
                dkeys + old * Lp, Lp);
    }

    // Makes the runs of a chunk, the last ones, ready for its gradients: the number of the first.
    size_t scale_runs(int64_t c) {
        size_t first = runs.size();
        while (first && runs[first - 1].begin >= c * TOKENS) --first;
        for (size_t r = first; r < runs.size(); ++r) {
            runs[r].begin -= c * TOKENS, runs[r].end -= c * TOKENS;
            for (int64_t i = runs[r].begin; forgets && i < runs[r].end; ++i)
                for (int64_t l = 0; l < Lp; l += W) forget_at(runs[r].begin, i, l);
            scale_keys(runs[r]);
        }
        return first;
    }

    // The gradients through the latents, and all gradients of the values that they share.
    void backward_latents(int64_t c, int64_t rows) {
        const int64_t token = task.begin + c * TOKENS;
        load_logits(c, rows);
        if (late) load_late(c, rows);
        else if (PAIR > 1) load_values(c, rows, value_rows);
        const size_t first = scale_runs(c);
        for (size_t r = first; r < runs.size(); ++r) {
            if (late) add_scores(runs[r], scores, TOKENS);
            else add_scores(runs[r], weights + base, ld);
        }
        if (late) to_late(rows);
        else to_keys(c, rows, weights, dy, true, true);
        for (; runs.size() > first; runs.pop_back()) {
            const LatentRun& run = runs.back();
            refer_back(top.data(), run);
            top.assign(run.before.top, run.before.top + Lp);
            if (late) backward_run(run, late_v, late_dv, late_pairs, TOKENS);
            else backward_run(run, own_values(c), slot(c).dv, pairs + base, ld);
        }
        for (int64_t i = 0; i < rows; ++i) {  // through the softmax over the latents and the window
            T *x = pulled + i * Lq, *y = p + i * Lq, total = 0;
            for (int64_t l = column; l < W + L; ++l) total += x[l];
            for (int64_t l = column; l < W + L; ++l) x[l] -= y[l] * total;
            totals[i] = total;
        }
        put(op.dlatent_q, task.row, token, task.h, rows, pulled + column, Lq);
        if (late) put_late(c, rows);
        else put(op.dlatent_k, task.row, token, task.h, rows, dkeys, Lp);
        if (forgets) put(op.dlog_decay, task.row, token, task.h, rows, decays, Lp);
    }

    // Of a run: delta_t = <dy_t, sum_s e_s v_s + U>, p d, the sums of p d / alpha from the end, and
    // the scalar with these added. `products` holds <dy_t, v_s>.
    void through_mass(const LatentRun& run, const T* products, int64_t ldp) {
        const int64_t begin = run.begin, end = run.end, count = end - begin;
        for (int64_t i = begin; i < end; ++i) {  // <dy_t, v_s> for s <= t alone
            const T* from = products + i * ldp;
            T* to = before + i * TOKENS;
            for (int64_t c = begin / W * W; c < least(TOKENS, i + ROWS + W); c += W) {
                V<T> seen = c <= i ? load_all(from + c) : V<T>{};
                store_all(to + c, within(seen, V<T>{}, c, begin, i + 1));
            }
        }
        transpose(run.before.sum, Dp, 0, L, D, turned, Lp);
        product(delta + begin * Lp, Lp, false, count, Lp, dy + begin * Dp, Dp, int64_t(1), turned,
                Lp, D);
        for (int64_t l = 0; l < Lp; l += W)
            for (int64_t i = begin; i < end; i += ROWS) {
                const int64_t some = least(ROWS, end - i);
                tile(some, delta + i * Lp + l, Lp, true, before + i * TOKENS + begin, TOKENS,
                     int64_t(1), e + begin * Lp + l, Lp, i + some - begin);
            }
        // p d and its part of the logits' gradients, summed from the end: never as a difference of
        // sums, which cancels.
        for (int64_t l = 0; l < Lp; l += W) {
            V<T> later = load_all(scalar + l);
            for (int64_t i = end - 1; i >= begin; --i) {
                V<T> share = load_all(ratio + i * Lp + l), mass = load_all(alpha + i * Lp + l);
                V<T> asked = load_all(delta + i * Lp + l) * share;
                V<T> gone = select(all(T(0)) < mass, asked / mass, mass);
                store(pulled + i * Lq + W + l, asked, Lp - l);
                later = later + gone;
                store_all(lost + i * Lp + l, later);
            }
            store_all(scalar + l, later);
        }
    }

    // Adds the queries of a run to R.
    void add_reverse(const LatentRun& run) {
        product(reverse, Dp, true, L, Dp, ratio + run.begin * Lp, int64_t(1), Lp,
                dy + run.begin * Dp, Dp, run.end - run.begin);
    }

    // For sources with values v. Their gradients are added to dv; `products` holds <dy_t, v_s>.
    void backward_run(const LatentRun& run, const T* v, T* dv, const T* products, int64_t ldp) {
        const int64_t begin = run.begin, end = run.end, count = end - begin;
        through_mass(run, products, ldp);
        transpose(reverse, Dp, 0, L, D, turned, Lp);
        product(dkeys + begin * Lp, Lp, false, count, Lp, v + begin * Dp, Dp, int64_t(1), turned,
                Lp, D);
        for (int64_t l = 0; l < Lp; l += W)
            for (int64_t i = begin; i < end; i += ROWS)
                tile(least(ROWS, end - i), dkeys + i * Lp + l, Lp, true, before + i * TOKENS + i,
                     int64_t(1), TOKENS, ratio + i * Lp + l, Lp, end - i);
        for (int64_t i = begin * Lp; i < end * Lp; i += W)
            store_all(dkeys + i, load_all(e + i) * (load_all(dkeys + i) - load_all(lost + i)));
        product(dv + begin * Dp, Dp, true, count, Dp, e + begin * Lp, Lp, int64_t(1), reverse, Dp,
                L);
        add_reverse(run);
        if (forgets) backward_decays(run);
    }

    // Overwrites the log-decays of a run's tokens with their gradients.
    void backward_decays(const LatentRun& run) {
        for (int64_t l = 0; l < L; ++l) at_row[l] = log_mass_gradient(run.before, l);
        for (int64_t l = 0; l < Lp; l += W) {
            V<T> sum = load_all(at_row + l);
            for (int64_t i = run.begin; i < run.end; ++i) {
                store_all(decays + i * Lp + l, sum);
                sum = sum + load_all(dkeys + i * Lp + l);
            }
        }
    }

    // The gradient of the log-mass of the state that R and its scalar are relative to.
    T log_mass_gradient(const Latents& at, int64_t l) const {
        V<T> sums{};
        for (int64_t d = 0; d < Dp; d += W)
            sums = sums + load_all(at.sum + l * Dp + d) * load_all(reverse + l * Dp + d);
        return sum(sums) - at.mass[l] * scalar[l];
    }
};

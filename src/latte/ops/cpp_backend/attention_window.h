// The window of a head and its sinks: scores, softmax, products with values, and the backward pass.

#include "attention_head.h"

struct WindowHead : HeadData {
    using HeadData::HeadData;

    // Keys and values of a chunk. Chunks before the first one hold the earlier state's.
    void load_keys(int64_t chunk) {
        Keys& s = slot(chunk);
        const int64_t first = chunk * TOKENS, P = op.tail();
        int64_t from = 0, stop = TOKENS;
        T *k = numbers_of<T>(s.k, key_rows), *v = numbers_of<T>(s.v, value_rows);
        s.masked = false;
        if (first >= 0) {
            stop = rows_of(chunk);
            if (near) take(op.k, task.row, task.begin + first, task.g, stop, k, Kp);
            take(op.v, task.row, task.begin + first, task.g, stop, v, Dp);
        } else {
            from = most(0, -P - first);
            if (from >= TOKENS) return;
            take(op.tail_k, task.n, P + first + from, task.g, stop - from, k + from * Kp, Kp);
            take(op.tail_v, task.n, P + first + from, task.g, stop - from, v + from * Dp, Dp);
        }
        for (int64_t i = from; i < stop; ++i) {
            const bool seen =
                first >= 0 ? real(first + i) : op.tail_mask.at<bool>()[task.n * P + P + first + i];
            s.hidden[i] = seen ? T(0) : lowest;
            if (seen) continue;
            s.masked = true;
            clear(k + i * Kp, Kp);
            clear(v + i * Dp, Dp);
        }
        s.strange = not_finite(v + from * Dp, (stop - from) * Dp);
        pack(k, from, stop, Kp, K, back ? s.k : nullptr, s.k_panels);
        pack(v, from, stop, Dp, D, s.v, back ? s.v_panels : nullptr);
        if (!back) return;
        clear(s.dk, TOKENS * Kp);
        clear(s.dv, TOKENS * Dp);
    }

    // Rows from ... stop of keys or values as factors of the products over tokens, and as panels,
    // the factors of those over their n columns; neither if it is null.
    void pack(T* x, int64_t from, int64_t stop, int64_t ldx, int64_t n, Factor<T>* to,
              Factor<T>* panels) {
        if (panels)
            turn<T>(along(x, ldx, from, stop, 0, ldx, left), ldx / PAIR, from, stop, factors(n),
                    panels);
        if (from % PAIR) clear(x + (from - 1) * ldx, ldx);
        if (to) across(x, ldx, from, stop, 0, ldx, to);
    }

    // The sinks of a sequence; masked ones are zeros already.
    void load_sinks() {
        T *k = numbers_of<T>(sinks.k, key_rows), *v = numbers_of<T>(sinks.v, value_rows);
        take(op.sink_k, task.n, 0, task.g, S, k, Kp);
        take(op.sink_v, task.n, 0, task.g, S, v, Dp);
        sinks.strange = not_finite(v, S * Dp);
        pack(k, 0, S, Kp, K, back ? sinks.k : nullptr, sinks.k_panels);
        pack(v, 0, S, Dp, D, sinks.v, back ? sinks.v_panels : nullptr);
        if (!back) return;
        clear(sinks.dk, Sp * Kp);
        clear(sinks.dv, Sp * Dp);
    }

    // The values of a chunk's tokens, as numbers: of the chunk whose values were loaded last.
    const T* own_values(int64_t chunk) { return numbers_of<T>(slot(chunk).v, value_rows); }

    // to[i][columns + s] = <x_i, sink s>, of keys or values.
    void against_sinks(int64_t rows, const T* x, int64_t ldx, int64_t n, const Factor<T>* panels,
                       T* to) {
        const Factor<T>* a = along(x, ldx, 0, rows, 0, ldx, left);
        ldx /= PAIR, n = factors(n);
        for (int64_t c = 0; c < S; c += W) {
            T* at = to + columns + c;
            if (S - c <= half_width<T>) half_product(at, ld, rows, a, ldx, panels + c * n, W, n);
            else product(at, ld, false, rows, W, a, ldx, int64_t(1), panels + c * n, W, n);
        }
    }

    // Adds to c, or sets it to, the sum over keys first ... stop of factors a, one row of ld
    // numbers per row of c, times the keys' rows b of n. With `apart` no other key is touched.
    void over_keys(int64_t rows, T* c, int64_t ldc, bool add, const Factor<T>* a,
                   const Factor<T>* b, int64_t n, int64_t first, int64_t stop, bool apart) {
        const int64_t lda = ld / PAIR;
        // If a query reads only one key of a pair, the other one is 0 in a copy.
        const auto one_key = [&](int64_t key) {
#if LATTE_PAIRS
            Pair edge[W];
            const uint32_t half = key % 2 ? 0xffff0000u : 0xffffu;
            for (int64_t d = 0; d < W; ++d) edge[d].bits = b[key / 2 * n + d].bits & half;
            tile(rows, c, ldc, add, a + key / 2, lda, 1, edge, W, 1);
            add = true;
#else
            (void)key;
#endif
        };
        // In the order of the keys, so that the sum has the same bits as without `apart`.
        const bool odd_first = apart && first % PAIR && first < stop;
        const bool odd_last = apart && stop % PAIR && first + odd_first < stop;
        if (odd_first) one_key(first++);
        const int64_t from = first / PAIR, end = factors(stop - odd_last);
        if (from < end || !(odd_first || odd_last))
            tile(rows, c, ldc, add, a + from, lda, 1, b + from * n, n, end - from), add = true;
        if (odd_last) one_key(stop - 1);
    }

    // Adds the sinks' part to the outputs: a query uses only the sinks that it may read.
    void with_sinks(int64_t chunk, int64_t rows, const T* x, T* to) {
        const int64_t together = sinks.strange ? 1 : ROWS;
        const Factor<T>* a = along(x, ld, 0, rows, columns, columns + S, left) + columns / PAIR;
        for (int64_t i = 0; i < rows; i += together) {
            const int64_t count = least(together, rows - i);
            const Span seen = sink_span(chunk, i + count - 1);
            if (seen.stop == columns) continue;
            for (int64_t d = 0; d < Dp; d += W)
                over_keys(count, to + i * Dp + d, Dp, true, a + i * ld / PAIR, sinks.v + d, Dp, 0,
                          seen.stop - columns, sinks.strange);
        }
    }

    // to[i][s] = <x_i, key s> for the keys that a query reads; all of its own chunk if
    // `whole_chunk`.
    void against(int64_t chunk, int64_t rows, const T* x, int64_t ldx, int64_t n, bool values,
                 bool whole_chunk, T* to) {
        const Factor<T>* a = along(x, ldx, 0, rows, 0, ldx, left);
        ldx /= PAIR, n = factors(n);
        for (int64_t j = 0; j < slots; ++j) {
            const Keys& s = slot(chunk - slots + 1 + j);
            const Factor<T>* panel = values ? s.v_panels : s.k_panels;
            for (int64_t c = j * TOKENS; c < (j + 1) * TOKENS; c += W, panel += n * W) {
                for (int64_t i = 0; i < rows; i += ROWS) {
                    const int64_t count = least(ROWS, rows - i);
                    int64_t first = first_key(chunk, i);
                    if (whole_chunk) first = least(first, base);
                    if (c + W <= first || c > last_key(i + count - 1)) continue;
                    tile(count, to + i * ld + c, ld, false, a + i * ldx, ldx, 1, panel, W, n);
                }
            }
        }
    }

    // to (rows begin ... end) = sum over keys of x[i][s] times their rows; x is 0 outside the band.
    void with_keys(int64_t chunk, int64_t begin, int64_t end, const T* x, bool values,
                   bool whole_chunk, T* to) {
        const int64_t n = values ? Dp : Kp;
        int64_t together = ROWS;
        int64_t oldest = first_key(chunk, begin);
        for (int64_t j = oldest / TOKENS; j < slots; ++j)
            if (slot(chunk - slots + 1 + j).strange) together = 1;
        if (whole_chunk) oldest = least(oldest, base);
        const Factor<T>* a = along(x, ld, begin, end, oldest, columns, left);
        for (int64_t d = 0; d < n; d += W) {
            for (int64_t i = begin; i < end; i += together) {
                const int64_t count = least(together, end - i), last = last_key(i + count - 1);
                int64_t first = first_key(chunk, i);
                if (whole_chunk) first = least(first, base);
                bool add = false;
                for (int64_t j = first / TOKENS; j < slots; ++j) {
                    const int64_t from = most(first, j * TOKENS);
                    const int64_t stop = least(last + 1, (j + 1) * TOKENS);
                    const Keys& s = slot(chunk - slots + 1 + j);
                    over_keys(count, to + i * n + d, n, add, a + (i * ld + j * TOKENS) / PAIR,
                              (values ? s.v : s.k) + d, n, from - j * TOKENS, stop - j * TOKENS,
                              together == 1);
                    add = true;
                }
            }
        }
    }

    // Adds sum over queries of x[i][s] y_i to the gradients of the keys, or of the values.
    void to_keys(int64_t chunk, int64_t rows, const T* x, const T* y, bool values,
                 bool whole_chunk) {
        const int64_t n = values ? Dp : Kp;
        const Factor<T>* a = across(x, ld, 0, rows, 0, columns, left);
        const Factor<T>* b = across(y, n, 0, rows, 0, n, right);
        for (int64_t j = 0; j < slots; ++j) {
            Keys& s = slot(chunk - slots + 1 + j);
            T* to = values ? s.dv : s.dk;
            const int64_t from = most(0, base + low - chunk * TOKENS - j * TOKENS);
            const int64_t stop = j == slots - 1 ? rows : TOKENS;
            for (int64_t d = 0; d < n; d += W) {
                for (int64_t i = from; i < stop; i += ROWS) {
                    const int64_t count = least(ROWS, stop - i), c = j * TOKENS + i - base;
                    const int64_t first = most(0, c) / PAIR;
                    int64_t last = least(rows - 1, c + count - 1 + reach);
                    if (whole_chunk && j == slots - 1) last = rows - 1;
                    last /= PAIR;
                    if (last < first) continue;
                    tile(count, to + i * n + d, n, true, a + first * ld + j * TOKENS + i, 1, ld,
                         b + first * n + d, n, last - first + 1);
                }
            }
        }
    }

    // Sets zeros around the keys that a query may read, as far as a tile reads, and in all of its
    // own chunk if `whole_chunk`. The vectors in which those keys begin and end have their zeros
    // already.
    void clear_around(int64_t chunk, int64_t i, bool whole_chunk, T* x) {
        for (int64_t c = columns + whole<T>(sink_span(chunk, i).stop - columns); c < ld; c += W)
            store_all(x + c, V<T>{});
        const int64_t first = first_key(chunk, i), stop = last_key(i) + 1;
        int64_t from = most(0, first - ROWS);
        if (whole_chunk) from = least(from, base);
        for (int64_t c = from / W * W; c < first / W * W; c += W) store_all(x + c, V<T>{});
        for (int64_t c = (stop + W - 1) / W * W; c < least(columns, stop + ROWS); c += W)
            store_all(x + c, V<T>{});
    }

    // Writes the mixture's probabilities to p, and the softmax of the window's scores to logits. In
    // the forward pass the latter are multiplied by the window's p.
    void probabilities(int64_t chunk, int64_t rows) {
        const int64_t token = task.begin + chunk * TOKENS;
        if (far) take(op.latent_q, task.row, token, task.h, rows, p + column, Lq);
        for (int64_t i = 0; i < rows; ++i) {
            ask_around(chunk, i);
            if (!op.joint) mix(chunk, i);
        }
        if (!near && !back) clear(weights, rows * ld);
        if (!near) return;
        take(op.q, task.row, token, task.h, rows, queries, Kp, query_scale);
        against(chunk, rows, queries, Kp, K, false, false, logits);
        if (S) {
            take(op.sink_q, task.row, token, task.h, rows, sink_queries, Kp, query_scale);
            against_sinks(rows, sink_queries, Kp, K, sinks.k_panels, logits);
        }
        for (int64_t i = 0; i < rows; ++i) {
            T* x = logits + i * ld;
            const Span seen = near_span(chunk, i), more = sink_span(chunk, i);
            const int64_t first = seen.first, stop = seen.stop;
            if (PAIR > 1)
                vectors<T>(seen, more, [&](int64_t c, Span) {
                    store_all(x + c, load_all(x + c) * score_scale);
                });
            if (op.softcap) cap(x, slope + (back ? i * ld : 0), seen, more);
            for (int64_t c = more.first; c < more.stop; ++c)
                if (!op.sink_mask.at<bool>()[task.n * S + c - columns]) x[c] = lowest;
            for (int64_t j = first / TOKENS; j < slots; ++j) {
                const Keys& s = slot(chunk - slots + 1 + j);
                if (!s.masked) continue;
                for (int64_t c = most(first, j * TOKENS); c < least(stop, (j + 1) * TOKENS); ++c)
                    x[c] = s.hidden[c - j * TOKENS] < T(0) ? lowest : x[c];
            }
            const Exponentials<T> found = exponentiate(x, seen, more);
            if (op.joint) {
                p[i * Lq + W - 1] += log_mass_of(found);
                mix(chunk, i);
            }
            normalise(x, seen, more, found.sum, back ? T(1) : p[i * Lq + W - 1]);
            if (!back) clear_around(chunk, i, shared, x);
        }
    }

    // p of query i, from the logits in its place. The window has all of p if there are no latents,
    // or if delayed latents have received nothing yet.
    void mix(int64_t chunk, int64_t i) {
        T* x = p + i * Lq;
        if (far) soften(x, {column, W + L}, {0, 0}, T(1));
        const bool alone = late && chunk * TOKENS + i < heard;
        if (alone) clear(x + W, Lp);
        if (alone || !far) x[W - 1] = 1;
    }

    // softcap tanh(x / softcap), and its slope.
    void cap(T* x, T* slopes, Span keys_seen, Span more) {
        vectors<T>(keys_seen, more, [&](int64_t c, Span) {
            const V<T> y = tanh(load_all(x + c) * T(1.0 / op.softcap));
            if (back) store_all(slopes + c, T(1) - y * y);
            store_all(x + c, y * T(op.softcap));
        });
    }

    // The window's part of a query's weights.
    void share_out(int64_t chunk, int64_t i) {
        const T *from = logits + i * ld, share = p[i * Lq + W - 1];
        T* to = weights + i * ld;
        vectors<T>(near_span(chunk, i), sink_span(chunk, i), [&](int64_t c, Span s) {
            store_all(to + c, within(load_all(from + c) * share, V<T>{}, c, s.first, s.stop));
        });
        clear_around(chunk, i, shared, to);
    }

    // Gradients of the tail's keys and values: 0 if no query reaches them.
    void end_tail() {
        const int64_t P = op.tail();
        for (int64_t c = (-P - TOKENS + 1) / TOKENS; c < 0; ++c) {
            const int64_t first = c * TOKENS, from = most(0, -P - first);
            Keys& s = slot(c);
            if (!chunks() || c < 1 - slots) {
                clear(s.dk, TOKENS * Kp);
                clear(s.dv, TOKENS * Dp);
            }
            put(op.dtail_k, task.n, P + first + from, task.h, TOKENS - from, s.dk + from * Kp, Kp);
            put(op.dtail_v, task.n, P + first + from, task.h, TOKENS - from, s.dv + from * Dp, Dp);
        }
    }

    // The sinks' part: of their values by the weights, of keys and queries by the logits'
    // gradients.
    void backward_sinks(int64_t c, int64_t rows) {
        const auto to_sinks = [&](const T* x, const T* y, int64_t n, T* to) {
            const Factor<T>* a = across(x, ld, 0, rows, columns, columns + S, left) + columns;
            const Factor<T>* b = across(y, n, 0, rows, 0, n, right);
            product(to, n, true, S, n, a, int64_t(1), ld, b, n, factors(rows));
        };
        to_sinks(weights, dy, Dp, sinks.dv);
        to_sinks(logits, sink_queries, Kp, sinks.dk);
        const Factor<T>* a =
            along(logits, ld, 0, rows, columns, columns + S, left) + columns / PAIR;
        product(sink_queries, Kp, false, rows, Kp, a, ld / PAIR, int64_t(1), sinks.k, Kp,
                factors(S));
        for (int64_t i = 0; i < rows * Kp; ++i) sink_queries[i] *= query_scale;
        put(op.dsink_q, task.row, task.begin + c * TOKENS, task.h, rows, sink_queries, Kp);
    }

    // Reads weights in `logits` and <dy, v> in `pairs`. Adds the window's part to `weights`, writes
    // the gradients of the scores to `logits`, and computes p_t[0] times its gradient.
    void through_window(int64_t chunk, int64_t i) {
        share_out(chunk, i);
        T *x = logits + i * ld, *y = pairs + i * ld;
        const Span keys_seen = near_span(chunk, i), more = sink_span(chunk, i);
        V<T> sums{};
        vectors<T>(keys_seen, more, [&](int64_t c, Span s) {
            sums = sums + within(load_all(x + c) * load_all(y + c), V<T>{}, c, s.first, s.stop);
        });
        const T total = sum(sums);
        pulled[i * Lq + W - 1] = p[i * Lq + W - 1] * total;
        if (!op.joint) through_softmax(chunk, i, total);
    }

    // Overwrites the weights with the gradients of the scores. `total` is the mean of <dy, v> under
    // the softmax.
    void through_softmax(int64_t chunk, int64_t i, T total) {
        T *x = logits + i * ld, *y = pairs + i * ld;
        const T share = p[i * Lq + W - 1] * score_scale;
        vectors<T>(near_span(chunk, i), sink_span(chunk, i), [&](int64_t c, Span s) {
            V<T> dx = load_all(x + c) * share * (load_all(y + c) - total);
            if (op.softcap) dx = dx * load_all(slope + i * ld + c);
            store_all(x + c, within(dx, V<T>{}, c, s.first, s.stop));
        });
        clear_around(chunk, i, false, x);
    }

    // Loads the last chunk's keys and the earlier keys that its queries read.
    void load_last_keys() {
        for (int64_t c = chunks() - slots + 1; c < chunks() && chunks(); ++c)
            if ((c + 1) * TOKENS > low) load_keys(c);
    }
    void load_oldest_keys(int64_t c) {
        const int64_t oldest = c - slots + 1;
        if ((oldest + 1) * TOKENS > low) load_keys(oldest);
    }
};

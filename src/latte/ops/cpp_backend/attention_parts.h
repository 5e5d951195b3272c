// Long sequences in parts, for more threads than there are heads.
//
// The window of a part only needs the keys before it. The latents' state at its beginning is merged
// from two passes. First each part computes the state of its own tokens alone: keys and values, a
// small share of the arithmetic. Then the states are merged in the order of the parts, and every
// part is processed as a sequence that continues from its state:
//
//     top = max(top_a + G, top_b),  m = e^{top_a + G - top} m_a + e^{top_b - top} m_b,  U as m
//
// with G the later part's total log-decay. Backward, R and its scalar are merged from the end.
// There a part needs p and <dy, v> too. The gradients of keys before a part are kept apart, and
// added when all parts are done.

#include "attention_latents.h"

struct PartHead : LatentHead {
    using LatentHead::LatentHead;

    // A part's total log-decay. First parts do not need it, because no border is before them.
    void add_forgotten(const LatentRun& run) {
        double* total = op.borders.forgotten.at<double>() + border_at(task.border);
        for (int64_t l = 0; l < L; ++l) total[l] += double(run.forgotten[l]);
    }
    void begin_local(const HeadTask& given) {
        begin_task(given);
        if (forgets && task.from)
            std::memset(op.borders.forgotten.at<double>() + border_at(task.border), 0,
                        size_t(L) * 8);
    }

    // The state of a part alone, put where the next part begins.
    void local_chunk(int64_t c) {
        walk_chunk(c, [&](const LatentRun& run) {
            if (forgets && task.from) add_forgotten(run);
        });
    }
    void end_local() { put_kept(task.stop / SEGMENT); }

    // R and its scalar after the last token of the task: from the gradients of the final state, or
    // zero in an earlier part.
    void begin_end() {
        if (!far) return;
        if (chunks()) walk_segment((task.stop - 1) / SEGMENT);
        top.assign(state.top, state.top + Lp);
        if (task.last) return begin_reverse();
        clear(reverse, Lp * Dp);
        clear(scalar, Lp);
    }

    // R and its scalar as they are where the next part begins.
    void take_reverse() {
        const int64_t at = border_at(task.border + 1);
        copy(top.data(), op.borders.top.at<T>() + at, L);
        copy(scalar, op.borders.scalar.at<T>() + at, L);
        const T* from = op.borders.reverse.at<T>() + at * D;
        copy_rows(reverse, Dp, from, D, L, D);
    }

    // The R of a part alone. With `joint`, p needs the window's scores.
    void begin_local_reverse(const HeadTask& given) {
        begin_local(given);
        begin_end();
        if (!op.joint) return;
        if (S) load_sinks();
        load_last_keys();
    }
    void local_reverse_chunk(int64_t c) {
        const int64_t rows = rows_of(c), token = task.begin + c * TOKENS;
        if (op.joint) {
            load_oldest_keys(c);
            probabilities(c, rows);
        } else {
            take(op.latent_q, task.row, token, task.h, rows, p + column, Lq);
            for (int64_t i = 0; i < rows; ++i) mix(c, i);
        }
        take(op.dout, task.row, token, task.h, rows, dy, Dp);
        load_logits(c, rows);
        load_late(c, rows);
        for (size_t first = scale_runs(c); runs.size() > first; runs.pop_back()) {
            const LatentRun& run = runs.back();
            if (forgets) add_forgotten(run);
            refer_back(top.data(), run);
            top.assign(run.before.top, run.before.top + Lp);
            through_mass(run, late_pairs, TOKENS);
            add_reverse(run);
        }
        if (c > first_chunk() && c * TOKENS % SEGMENT == 0) walk_segment(c * TOKENS / SEGMENT - 1);
    }
    void end_local_reverse() {
        const int64_t at = border_at(task.border);
        copy(op.borders.top.at<T>() + at, top.data(), L);
        copy(op.borders.scalar.at<T>() + at, scalar, L);
        T* to = op.borders.reverse.at<T>() + at * D;
        copy_rows(to, D, reverse, Dp, L, D);
    }

    // Gradients of the keys before a part, and of the sinks, by the part's queries.
    void put_border() {
        const Borders& to = op.borders;
        if (!task.from) return;
        if (S) {
            put(to.dsink_k, task.border, 0, task.h, S, sinks.dk, Kp);
            put(to.dsink_v, task.border, 0, task.h, S, sinks.dv, Dp);
        }
        for (int64_t j = 0; j < slots - 1; ++j) {
            const Keys& s = slot(first_chunk() - slots + 1 + j);
            put(to.dk, task.border, j * TOKENS, task.h, TOKENS, s.dk, Kp);
            put(to.dv, task.border, j * TOKENS, task.h, TOKENS, s.dv, Dp);
        }
    }
};

// Some of the pieces.
template <class Test>
static std::vector<Piece> chosen(const std::vector<Piece>& pieces, const Test& test) {
    std::vector<Piece> found;
    for (const Piece& piece : pieces)
        if (test(piece)) found.push_back(piece);
    return found;
}

// Calls work(task, part) for every head and part of a sequence but the first, in their order.
template <class Work>
static void every_border(const Attention& op, bool back, const Work& work) {
    const int64_t H = op.heads(), each = op.plan.part;
    parallel(op.sequences() * H, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t n = i / H, parts = (op.length(n) + each - 1) / each;
            for (int64_t j = 1; j < parts; ++j) {
                const int64_t from = (back ? parts - j : j) * each;
                const int64_t stop = least(from + each, op.length(n));
                work(HeadTask(op, {n, i % H, 1, from, stop, stop == op.length(n)}, i % H));
            }
        }
    });
}

// The states where parts begin, from those of the parts alone.
static void join_states(const Attention& op) {
    const int64_t H = op.heads(), L = op.latents(), D = op.v.sizes[3];
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    every_border(op, false, [&](const HeadTask& task) {
        const int64_t before = task.from - op.plan.part;
        if (!before) return;  // that part began with the state before the sequence
        const int64_t from = ((task.first_kept + before / SEGMENT) * H + task.h) * L;
        const int64_t to = ((task.first_kept + task.from / SEGMENT) * H + task.h) * L;
        const double* gone = op.forgets() ? op.borders.forgotten.at<double>() : nullptr;
        if (gone) gone += ((task.border - 1) * H + task.h) * L;
        for (int64_t l = 0; l < L; ++l) {
            T *top = op.kept_top.at<T>() + to + l, *mass = op.kept_mass.at<T>() + to + l;
            const double moved = double(op.kept_top.at<T>()[from + l]) + (gone ? gone[l] : 0.0);
            const T highest = T(moved) > *top ? T(moved) : *top;
            const bool empty = highest == lowest;
            const T old = empty ? T(1) : T(std::exp(moved - double(highest)));
            const T own = empty ? T(1) : T(std::exp(double(*top) - double(highest)));
            *top = highest, *mass = old * op.kept_mass.at<T>()[from + l] + own * *mass;
            const T* sum_before = op.kept_sum.at<T>() + (from + l) * D;
            T* sum = op.kept_sum.at<T>() + (to + l) * D;
            for (int64_t d = 0; d < D; ++d) sum[d] = old * sum_before[d] + own * sum[d];
        }
    });
}

// R and its scalar where parts begin, from those of the parts alone.
static void join_reverse(const Attention& op) {
    const int64_t H = op.heads(), L = op.latents(), D = op.v.sizes[3];
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    every_border(op, true, [&](const HeadTask& task) {
        if (task.last) return;
        const Borders& borders = op.borders;
        const int64_t to = (task.border * H + task.h) * L, from = to + H * L;
        for (int64_t l = 0; l < L; ++l) {
            const T top = borders.top.at<T>()[to + l], later = borders.top.at<T>()[from + l];
            const double gone = op.forgets() ? borders.forgotten.at<double>()[to + l] : 0.0;
            // Before a later part that has seen nothing R is 0.
            const T factor =
                later == lowest ? T(1) : T(std::exp(double(top) - double(later) + gone));
            borders.scalar.at<T>()[to + l] += factor * borders.scalar.at<T>()[from + l];
            const T* sum_later = borders.reverse.at<T>() + (from + l) * D;
            T* sum = borders.reverse.at<T>() + (to + l) * D;
            for (int64_t d = 0; d < D; ++d) sum[d] += factor * sum_later[d];
        }
    });
}

// Adds the first tokens of one head, of T both.
static void add_tokens(const Tensor& x, int64_t row, const Tensor& to, int64_t to_row,
                       int64_t token, int64_t head, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const T* from = x.at<T>() + place(x, row, i, head);
        T* sum = to.at<T>() + place(to, to_row, token + i, head);
        for (int64_t d = 0; d < x.sizes[3]; ++d) sum[d] += from[d];
    }
}

// Adds the parts' gradients of the keys before them and of sinks, in the order of the parts.
static void add_borders(const Attention& op) {
    if (!op.near()) return;
    const int64_t rows = op.border_rows(), S = op.sinks();
    every_border(op, false, [&](const HeadTask& task) {
        const int64_t token = task.begin + task.from - rows;
        add_tokens(op.borders.dk, task.border, op.dk, task.row, token, task.h, rows);
        add_tokens(op.borders.dv, task.border, op.dv, task.row, token, task.h, rows);
        if (!S) return;
        add_tokens(op.borders.dsink_k, task.border, op.dsink_k, task.n, 0, task.h, S);
        add_tokens(op.borders.dsink_v, task.border, op.dsink_v, task.n, 0, task.h, S);
    });
}

// The walks over heads, forward and backward.

#include "attention_parts.h"

struct Head : PartHead {
    using PartHead::PartHead;

    void begin_forward(const HeadTask& given) {
        begin_task(given);
        if (S) load_sinks();
        if (far && task.from) take_kept(task.from / SEGMENT);
        for (int64_t c = first_chunk() + 1 - slots; c < first_chunk() && chunks(); ++c)
            if ((c + 1) * TOKENS > low) load_keys(c);
    }

    void forward_chunk(int64_t c) {
        const int64_t rows = rows_of(c);
        if (far && c * TOKENS % SEGMENT == 0) put_kept(c * TOKENS / SEGMENT);
        load_keys(c);
        probabilities(c, rows);
        if (far) load_logits(c, rows);
        if (!shared) with_keys(c, 0, rows, weights, true, false, out);
        bool strange = false;
        if (late) {
            load_values(c, rows, late_v);
            strange = not_finite(late_v, rows * Dp);
            clear(scores, rows * TOKENS);
        }
        for (int64_t begin = 0; far && begin < rows;) {
            const LatentRun run = next_run(begin, rows);
            scale_keys(run);
            if (shared) {
                add_scores(run, weights + base, ld);
                with_keys(c, begin, run.end, weights, true, true, out);
            } else {
                add_scores(run, scores, TOKENS);
                with_late(run, strange);
            }
            product(out + begin * Dp, Dp, true, run.end - begin, Dp, ratio + begin * Lp, Lp,
                    int64_t(1), state.sum, Dp, L);
            take_in(run, late ? late_v : own_values(c));
            begin = run.end;
        }
        if (S) with_sinks(c, rows, weights, out);
        put(op.out, task.row, task.begin + c * TOKENS, task.h, rows, out, Dp);
    }

    void end_forward() {
        if (!task.last) return;
        const int64_t at = (task.n * op.heads() + task.h) * L;
        for (int64_t l = 0; l < L; ++l) {
            const T mass = state.mass[l];
            op.last_mass.at<T>()[at + l] = mass == T(0) ? lowest : state.top[l] + std::log(mass);
            for (int64_t d = 0; d < D; ++d)
                op.last_mean.at<T>()[(at + l) * D + d] =
                    mass == T(0) ? T(0) : state.sum[l * Dp + d] / mass;
        }
    }

    void begin_backward(const HeadTask& given) {
        begin_task(given);
        if (S) load_sinks();
        begin_end();
        if (far && !task.last) take_reverse();
        if (late && task.last)  // no latent has received the last tokens
            for (int64_t i = most(0, task.count - delay); i < task.count; ++i)
                std::memset(op.dlatent_k.data +
                                place(op.dlatent_k, task.row, task.begin + i, task.h) * size,
                            0, size_t(L * size));
        load_last_keys();
    }
    void backward_chunk(int64_t c) {
        load_oldest_keys(c);
        pull(c);
        Keys& s = slot(c);
        const int64_t token = task.begin + c * TOKENS, rows = rows_of(c);
        if (near) put(op.dk, task.row, token, task.h, rows, s.dk, Kp);
        put(op.dv, task.row, token, task.h, rows, s.dv, Dp);
        if (far && c > first_chunk() && c * TOKENS % SEGMENT == 0)
            walk_segment(c * TOKENS / SEGMENT - 1);
    }

    void end_backward() {
        if (op.plan.split) put_border();
        if (task.from) return;
        if (S) {
            put(op.dsink_k, task.n, 0, task.h, S, sinks.dk, Kp);
            put(op.dsink_v, task.n, 0, task.h, S, sinks.dv, Dp);
        }
        if (op.tail_k) end_tail();
        if (op.log_mass) end_state();
    }

    void pull(int64_t c) {
        const int64_t rows = rows_of(c), token = task.begin + c * TOKENS;
        probabilities(c, rows);
        take(op.dout, task.row, token, task.h, rows, dy, Dp);
        against(c, rows, dy, Dp, D, true, shared, pairs);
        if (S) against_sinks(rows, dy, Dp, D, sinks.v_panels, pairs);
        for (int64_t i = 0; i < rows; ++i) through_window(c, i);
        if (!shared) to_keys(c, rows, weights, dy, true, false);
        if (far) backward_latents(c, rows);
        for (int64_t i = 0; op.joint && i < rows; ++i) through_softmax(c, i, totals[i]);
        if (S) backward_sinks(c, rows);
        if (!near) return;
        to_keys(c, rows, logits, queries, false, false);
        with_keys(c, 0, rows, logits, false, false, queries);
        for (int64_t i = 0; i < rows * Kp; ++i) queries[i] *= query_scale;
        put(op.dq, task.row, token, task.h, rows, queries, Kp);
    }
};

// One walk over pieces: what each of their heads does at its first chunk, at every chunk, and after
// the last one.
struct Stage {
    void (Head::*begin)(const HeadTask&);
    void (Head::*chunk)(int64_t);
    void (Head::*end)();
};

static void walk(const Attention& op, bool back, const std::vector<Piece>& pieces,
                 const Stage& stage) {
    int64_t together = 0;
    for (const Piece& piece : pieces) together = most(together, piece.heads);
    parallel_tasks(int64_t(pieces.size()), [&](Tasks& tasks) {
        Memory shared;
        std::vector<Head> heads;
        heads.reserve(size_t(together));
        for (int64_t i = 0; i < together; ++i) heads.emplace_back(op, back, shared);
        for (int64_t task = tasks.next(); task >= 0; task = tasks.next()) {
            const Piece& piece = pieces[size_t(task)];
            for (int64_t i = 0; i < piece.heads; ++i) {
                Head& head = heads[size_t(i)];
                (head.*stage.begin)(HeadTask(op, piece, piece.head + i));
                const bool last = i == piece.heads - 1;
                head.ahead_head = last ? piece.head : head.task.h + 1;
                head.ahead_chunks = !last ? 0 : back ? -1 : 1;
            }
            const int64_t first = heads[0].first_chunk(), stop = heads[0].chunks();
            for (int64_t c = first; c < stop; ++c)
                for (int64_t i = 0; i < piece.heads; ++i)
                    (heads[size_t(i)].*stage.chunk)(back ? stop - 1 - (c - first) : c);
            for (int64_t i = 0; i < piece.heads; ++i) (heads[size_t(i)].*stage.end)();
        }
    });
}

static void run_forward_in(const Attention& op) {
    const std::vector<Piece>& pieces = op.plan.pieces;
    if (op.plan.split && op.far()) {
        const Stage local = {&Head::begin_local, &Head::local_chunk, &Head::end_local};
        walk(op, false, chosen(pieces, [](const Piece& piece) { return !piece.last; }), local);
        join_states(op);
    }
    walk(op, false, pieces, {&Head::begin_forward, &Head::forward_chunk, &Head::end_forward});
}

static void run_backward_in(const Attention& op) {
    const std::vector<Piece>& pieces = op.plan.pieces;
    if (op.plan.split && op.far()) {
        const Stage local = {&Head::begin_local_reverse, &Head::local_reverse_chunk,
                             &Head::end_local_reverse};
        walk(op, true, chosen(pieces, [](const Piece& piece) { return piece.from > 0; }), local);
        join_reverse(op);
    }
    walk(op, true, pieces, {&Head::begin_backward, &Head::backward_chunk, &Head::end_backward});
    if (op.plan.split) add_borders(op);
}

// One head of one sequence: the data that stays from chunk to chunk, and the buffers of a chunk.

// The sinks of a sequence, ready to be read by queries, in rows of whole vectors.
struct SinkKeys {
    Factor<T>*k, *k_panels, *v, *v_panels;
    T *dk, *dv;
    bool strange;  // a value is not finite: no query may multiply it by 0
};

// A chunk of keys and values.
struct Keys : SinkKeys {
    T* hidden;    // 0, or -inf for a key that is masked
    bool masked;  // one of them is
};

// The latents before a token, relative to `top`.
struct Latents {
    T *top, *mass, *sum;
};

// Tokens of a chunk with one reference for every latent, the state before them, and the total
// log-decay of each of them.
struct LatentRun {
    int64_t begin, end;
    Latents before;
    const T* forgotten;
};

// The data of a head that is kept from chunk to chunk, and the buffers for the present chunk.
struct HeadData {
    static constexpr int64_t W = width<T>;
    static constexpr T lowest = -std::numeric_limits<T>::infinity();
    const Attention& op;
    const int64_t K, D, L, Kp, Dp, Lp, Lq;     // widths, of whole vectors
    const int64_t size;                        // bytes of an element of the inputs
    int64_t reach, slots, columns, base, low;  // keys before a query; chunks of keys it may read
    const int64_t S, Sp;
    int64_t ld;  // of a row's columns: those of the chunks, then of the sinks
    const bool near, far, back, forgets;
    const int64_t delay;      // tokens by which latents are late
    const bool late, shared;  // latents; that share the columns of a chunk's own keys
    int64_t heard = 0;        // the first token at which delayed latents have received a source
    const int64_t column;  // of p at which latent_q begins: the window's is W - 1, latents follow
    Memory own_memory;
    std::vector<Keys> ring;
    T *queries, *dy, *logits, *weights, *pairs, *slope, *p, *keys, *decays, *forgotten, *e,
        *e_panels, *alpha, *ratio, *out, *before, *delta, *lost, *pulled, *dkeys, *turned, *tops,
        *at_row, *totals, *reverse, *scalar, *sink_queries, *scores, *late_v, *late_panels,
        *late_pairs, *late_dv, *key_rows = nullptr, *value_rows = nullptr;
    // Inputs of a product, as factors.
    Factor<T>*left = nullptr, *right = nullptr;
    // The scale is applied to the scores if inputs stay in bf16, otherwise to the queries.
    const T query_scale, score_scale;
    SinkKeys sinks;
    Latents state;
    std::vector<T> top;           // what R is relative to
    std::vector<T> saved;         // states before the runs of a segment
    std::vector<LatentRun> runs;  // of a segment, or of a chunk
    HeadTask task;
    int64_t ahead_head = 0, ahead_chunks = 0;  // what comes after a chunk: whose, how far from it

    HeadData(const Attention& attention, bool backward, Memory& common)
        : op(attention), K(op.key_width()), D(op.v.sizes[3]), L(op.latents()), Kp(whole<T>(K)),
          Dp(whole<T>(D)), Lp(whole<T>(L)), Lq(Lp + W), size(op.v.bytes_each()), S(op.sinks()),
          Sp(whole<T>(S)), near(op.near()), far(op.far()), back(backward), forgets(op.forgets()),
          delay(op.delay), late(far && delay), shared(far && !delay), column(near ? W - 1 : W),
          query_scale(PAIR == 1 ? T(op.scale) : T(1)), score_scale(PAIR == 1 ? T(1) : T(op.scale)) {
        const int64_t longest = op.tokens() + op.tail();
        reach = least(op.window, longest) - 1;             // -1: nothing is near
        slots = (reach + late + TOKENS - 1) / TOKENS + 1;  // late: and the token that leaves
        columns = slots * TOKENS, base = columns - TOKENS, ld = columns + Sp;
        for (Memory* memory : {&own_memory, &common}) {
            for (int pass = 0; pass < 2; ++pass) {  // first the sizes, then the places
                memory->used = 0;
                auto room = [&](int64_t count) { return memory->room<T>(count); };
                if (memory == &common) divide(room);
                else divide_own(room);
                if (!pass) memory->reserve();
            }
        }
    }

    // Room for rows of n numbers, as factors.
    template <class Room>
    Factor<T>* room_for_factors(const Room& room, int64_t rows, int64_t n) {
        static_assert(sizeof(Factor<T>) == sizeof(T));
        return reinterpret_cast<Factor<T>*>(room(rows * factors(n)));
    }

    template <class Room>
    void divide_own(const Room& room) {
        const auto packed = [&](int64_t rows, int64_t n) {
            return room_for_factors(room, rows, n);
        };
        ring.assign(size_t(slots), Keys{});
        for (Keys& s : ring) {
            s.k = packed(TOKENS, Kp), s.k_panels = packed(TOKENS, K), s.v = packed(TOKENS, Dp);
            s.hidden = room(TOKENS);
            if (!back) continue;
            s.v_panels = packed(TOKENS, D);
            s.dk = room(TOKENS * Kp), s.dv = room(TOKENS * Dp);
        }
        sinks.k = packed(Sp, Kp), sinks.k_panels = packed(Sp, K), sinks.v = packed(Sp, Dp);
        if (back) {
            sinks.v_panels = packed(Sp, D);
            sinks.dk = room(Sp * Kp), sinks.dv = room(Sp * Dp);
        }
        state = {room(Lp), room(Lp), room(Lp * Dp)};
        if (back) reverse = room(Lp * Dp), scalar = room(Lp);
    }

    template <class Room>
    void divide(const Room& room) {
        queries = room(TOKENS * Kp), logits = room(TOKENS * ld);
        sink_queries = room(S ? TOKENS * Kp : 0);
        scores = room(late ? TOKENS * TOKENS : 0), late_v = room(late ? TOKENS * Dp : 0);
        weights = back ? room(TOKENS * ld) : logits, p = room(TOKENS * Lq + W);
        keys = room(TOKENS * Lp), e = room(TOKENS * Lp), e_panels = room(TOKENS * Lp);
        alpha = room(TOKENS * Lp), ratio = room(TOKENS * Lp), out = room(TOKENS * Dp);
        tops = room(Lp), at_row = room(Lp), totals = room(TOKENS);
        if (PAIR > 1) {
            const int64_t rows = most(TOKENS, Sp), widest = most(ld, most(Kp, Dp));
            left = room_for_factors(room, rows, widest);
            right = room_for_factors(room, rows, widest);
            key_rows = room(rows * Kp), value_rows = room(rows * Dp);
        }
        decays = room(forgets ? TOKENS * Lp : 0), forgotten = room(TOKENS * Lp);
        if (!back) return;
        dy = room(TOKENS * Dp), pairs = room(TOKENS * ld);
        late_panels = room(late ? TOKENS * D : 0), late_pairs = room(late ? TOKENS * TOKENS : 0);
        late_dv = room(late ? TOKENS * Dp : 0);
        slope = room(op.softcap ? TOKENS * ld : 0), before = room(TOKENS * TOKENS);
        delta = room(TOKENS * Lp), lost = room(TOKENS * Lp), pulled = room(TOKENS * Lq + W);
        dkeys = room(TOKENS * Lp), turned = room(Dp * Lp);
        if (late || !far || !op.plan.split) return;  // for parts alone: attention_parts.h
        scores = room(TOKENS * TOKENS), late_v = room(TOKENS * Dp);
        late_panels = room(TOKENS * D), late_pairs = room(TOKENS * TOKENS);
    }

    Keys& slot(int64_t chunk) { return ring[size_t(((chunk % slots) + slots) % slots)]; }
    int64_t rows_of(int64_t chunk) const { return least(TOKENS, task.count - chunk * TOKENS); }
    bool real(int64_t token) const {
        return !op.mask || op.mask.at<bool>()[task.row * op.tokens() + task.begin + token];
    }
    // Whether there is a source for latents: a valid token, or a pending one before the first.
    bool source(int64_t token) const {
        if (token >= 0) return real(token);
        return op.pending_k && op.pending_mask.at<bool>()[(task.n + 1) * delay + token];
    }

    // Prefetches the memory of a token that is read or written soon: rows of one head are too far
    // apart for the processor to predict.
    void ask(const Tensor& x, int64_t token, int64_t head, int64_t each) const {
        if (token < 0 || token >= task.count) return;
        const char* at = x.data + each * place(x, task.row, task.begin + token, head);
        for (int64_t byte = 0; byte < x.sizes[3] * each; byte += 64) __builtin_prefetch(at + byte);
    }
    void ask_around(int64_t chunk, int64_t i) const {
        const int64_t here = chunk * TOKENS + i, next = here + ahead_chunks * TOKENS;
        const int64_t key = back ? next - base : next, h = ahead_head;
        const int64_t g = h / (op.heads() / op.groups());
        if (far) ask(op.latent_q, next, h, size), ask(op.latent_k, next - delay, h, size);
        if (forgets) ask(op.log_decay, next, h, sizeof(T));
        if (near) ask(op.q, next, h, size), ask(op.k, key, g, size);
        ask(op.v, key, g, size);
        if (S) ask(op.sink_q, next, h, size);
        if (back) ask(op.dout, next, h, size);
        if (!back) return ask(op.out, here, task.h, size);
        ask(op.dv, here, task.h, size);
        if (far) ask(op.dlatent_q, here, task.h, size);
        if (far) ask(op.dlatent_k, here - delay, task.h, size);
        if (S) ask(op.dsink_q, here, task.h, size);
        if (forgets) ask(op.dlog_decay, here, task.h, sizeof(T));
        if (near) ask(op.dq, here, task.h, size), ask(op.dk, here, task.h, size);
    }

    // The places of keys that query i of a chunk may see, among its columns.
    int64_t first_key(int64_t chunk, int64_t i) const {
        return base + most(i - reach, low - chunk * TOKENS);
    }
    int64_t last_key(int64_t i) const { return base + i; }
    Span near_span(int64_t chunk, int64_t i) const {
        return {first_key(chunk, i), last_key(i) + 1};
    }
    // The columns of the sinks that query i of a chunk sees.
    Span sink_span(int64_t chunk, int64_t i) const {
        if (!S) return {columns, columns};
        const int64_t token = task.begin + chunk * TOKENS + i;
        return {columns, columns + op.sinks_seen.at<int64_t>()[task.row * op.tokens() + token]};
    }

    int64_t border_at(int64_t border) const { return (border * op.heads() + task.h) * L; }
    int64_t kept_at(int64_t segment) const {
        return ((task.first_kept + segment) * op.heads() + task.h) * L;
    }

    // The task's first chunk, and the one after its last.
    int64_t first_chunk() const { return task.from / TOKENS; }
    int64_t chunks() const { return (task.stop + TOKENS - 1) / TOKENS; }
};

// One group of key heads of one row, block by block: forward and backward.
//
// A row of logits has columns for the latents, the sinks, the kept keys and the window's keys, in
// this order. So the columns that a query sees are one span. Latents end at `first`, sinks at
// `base`.

struct Columns {
    int64_t start, stop;
};

// The sum of all lanes: `sum` is a member below.
LATTE_INLINE T added(V<T> x) { return sum(x); }

struct KeptHead {
    static constexpr int64_t W = width<T>;
    static constexpr T lowest = -std::numeric_limits<T>::infinity();
    const KeptAttention& op;
    const int64_t K, D, L, R, n, C, J, Z;
    const int64_t Kp, Dp, RL, RLp, Lq;  // of whole vectors, but RL
    const int64_t base, first, ld;      // where keys begin, where sinks do, columns of a row
    const int64_t together;             // queries that are processed at once
    const bool back, far, forgets;
    const T query_scale, score_scale;  // as in attention_head.h
    Memory memory;
    // A block's keys and values by column, and as panels; and their gradients.
    Factor<T>*keys, *key_panels, *values, *value_panels = nullptr, *sink_panels,
                                          *sink_value_panels = nullptr;
    T *key_rows, *value_rows, *dkeys = nullptr, *dvalues = nullptr;
    // The queries that are processed together.
    T *queries, *sink_queries, *latent_rows, *logits, *pairs = nullptr, *slope = nullptr, *out,
                                                      *dy = nullptr, *inverse;
    Factor<T>*left = nullptr, *right = nullptr;  // inputs of a product, as factors
    // The latents' state, the share of it that an update left, the sources they read.
    T *mass, *sum, *mean, *remains, *e, *late_v;
    double *top, *raw, *highest, *forgotten;
    // A segment's states after each update. Backward: R and n, the means transposed.
    T *masses = nullptr, *means = nullptr, *left_of = nullptr, *reverse = nullptr,
      *scalar = nullptr, *dmean = nullptr, *turned = nullptr, *dlate = nullptr;
    double *tops = nullptr, *dforgotten = nullptr;
    std::vector<int64_t> sources;               // of the block's keys, by column from `base` on
    std::vector<int64_t> hidden;                // columns that no query sees
    std::vector<int64_t> read;                  // slots that the latents read at the block's update
    std::vector<int64_t> stops;                 // where the columns end that each row sees
    int64_t b = 0, g = 0, set = 0, h0 = 0;      // row, group, set of heads, its first head
    int64_t z = 0, begin = 0, rows_in_all = 0;  // block, its first slot, slots up to the last query
    Columns visible{};                          // to the block's first query

    KeptHead(const KeptAttention& given, bool backward)
        : op(given), K(op.q.sizes[3]), D(op.v.sizes[3]), L(op.latents()), R(op.heads() / op.sets),
          n(op.sinks()), C(op.block), J(op.places()), Z(op.blocks()), Kp(whole<T>(K)),
          Dp(whole<T>(D)), RL(R * L), RLp(whole<T>(RL)), Lq(whole<T>(L + 1) + W),
          base(whole<T>(L + n)), first(base - n), ld(base + whole<T>(longest()) + W),
          together(least(C, most(1, QUERIES / R))), back(backward), far(op.far()),
          forgets(bool(op.log_decay)), query_scale(PAIR == 1 ? T(op.scale) : T(1)),
          score_scale(PAIR == 1 ? T(1) : T(op.scale)) {
        for (int pass = 0; pass < 2; ++pass) {  // first the sizes, then the places
            memory.used = 0;
            divide();
            if (!pass) memory.reserve();
        }
    }

    // The largest number of keys of a block, without sinks.
    int64_t longest() const { return J + least(op.window - 1, op.slots()) + C; }
    int64_t rows_at_once() const { return together * R; }

    void divide() {
        const auto room = [&](int64_t count) { return memory.room<T>(count); };
        const auto packed = [&](int64_t rows, int64_t width) {
            return reinterpret_cast<Factor<T>*>(room(rows * factors(width)));
        };
        const int64_t Q = rows_at_once() + ROWS, np = whole<T>(n);
        keys = packed(ld, Kp), values = packed(ld, Dp);
        key_rows = room(PAIR > 1 ? ld * Kp : 0), value_rows = room(PAIR > 1 ? ld * Dp : 0);
        key_panels = packed(ld, K), sink_panels = packed(np, K);
        queries = room(Q * Kp), sink_queries = room(n ? Q * Kp : 0), latent_rows = room(Q * Lq);
        logits = room(Q * ld), out = room(Q * most(Kp, Dp)), inverse = room(Q);
        if (PAIR > 1) {
            const int64_t rows = most(Q, ld), widest = most(ld, most(Kp, Dp));
            left = packed(rows, widest), right = packed(rows, widest);
        }
        mass = room(RLp), sum = room(RLp * Dp), mean = room(RLp * Dp), remains = room(RLp);
        e = room(far ? C * RLp : 0), late_v = room(far ? C * Dp : 0);
        top = memory.room<double>(RLp), raw = memory.room<double>(far ? C * RLp : 0);
        highest = memory.room<double>(RLp);
        forgotten = memory.room<double>(forgets ? op.slots() * RL : 0);
        if (!back) return;
        const int64_t X = op.together();
        value_panels = packed(ld, D), sink_value_panels = packed(np, D);
        dkeys = room(ld * Kp), dvalues = room(ld * Dp);
        pairs = room(Q * ld), slope = room(op.softcap ? Q * ld : 0), dy = room(Q * Dp);
        masses = room(X * RLp), left_of = room(X * RLp), tops = memory.room<double>(X * RLp);
        means = room(X * RLp * Dp + W * Dp);  // some more rows are read
        reverse = room((RLp + W) * Dp), scalar = room(RLp), dmean = room(RLp * Dp);
        dforgotten = memory.room<double>(forgets ? op.slots() * RL : 0);
        turned = room(far ? most(R * whole<T>(L) * D, Dp * RLp) : 0);
        dlate = room(far ? C * most(RLp, Dp) : 0);
    }

    int64_t token_of(int64_t source) const { return source - op.old(); }
    // The source at a slot: the old sources come first, then the tokens; -1 for none.
    int64_t source_at(int64_t slot) const {
        if (op.source) return op.source.at<int64_t>()[b * op.slots() + slot];
        const int64_t token = slot - op.front;
        return token >= 0 && token < op.tokens() ? token : -1;
    }
    // The token of one of the block's queries, or -1: some tokens of the first block are in the
    // state.
    int64_t query_at(int64_t i) const { return most(-1, token_of(source_at(begin + i))); }
    int64_t plan_at(int64_t block, int64_t each) const {
        return ((b * op.groups() + g) * Z + block) * each;
    }
    int64_t slot_of(int64_t place) const { return place / op.groups() - b * op.slots(); }
    int64_t state_of(int64_t block) const { return op.owner ? op.owner.at<int64_t>()[block] : b; }
    bool begins(int64_t block) const {
        return op.age && block < Z && op.age.at<int64_t>()[block] == 0;
    }

    bool ends(int64_t block) const {
        return block == (op.ends ? op.ends.at<int64_t>()[state_of(block)] : Z - 1);
    }

    // The rows of some sources in T, with zeros where there is no source.
    void take_sources(const Tensor& x, const Tensor& old, const int64_t* which, int64_t count,
                      T* to, int64_t ldx) {
        const int64_t M = op.old();
        for (int64_t i = 0; i < count;) {
            int64_t some = 1;
            if (which[i] < 0) clear(to + i * ldx, ldx);
            else {
                const bool past = which[i] < M;
                while (i + some < count && which[i + some] == which[i] + some &&
                       (which[i + some] < M) == past)
                    ++some;
                if (past) take(old, b, which[i], g, some, to + i * ldx, ldx);
                else take(x, b, token_of(which[i]), g, some, to + i * ldx, ldx);
            }
            i += some;
        }
    }

    // The keys and values of a block, and how many of its slots have queries.
    void load_block(int64_t block) {
        z = block, begin = op.front + z * C;
        rows_in_all = C;
        while (rows_in_all && query_at(rows_in_all - 1) < 0) --rows_in_all;
        if (!rows_in_all) return;
        sources.clear(), hidden.clear();
        const int64_t at = plan_at(z, J);
        for (int64_t j = 0; j < J; ++j)
            if (op.kept_there.at<bool>()[at + j])
                sources.push_back(source_at(slot_of(op.kept.at<int64_t>()[at + j])));
        const int64_t keys_kept = int64_t(sources.size());
        int64_t low = most(begin - op.window + 1, J);
        if (op.age) low = most(low, begin - op.age.at<int64_t>()[z] * C);
        while (source_at(low) < 0) ++low;
        const bool latents = far && op.begun.at<bool>()[plan_at(z, 1)];
        visible = {latents ? first - L : first, base + keys_kept + begin - low + 1};
        for (int64_t slot = low; slot < begin + rows_in_all; ++slot)
            sources.push_back(source_at(slot));
        const int64_t count = int64_t(sources.size());
        for (int64_t c = 0; c < count; ++c)
            if (sources[size_t(c)] < 0) hidden.push_back(base + c);
        for (int64_t s = 0; s < n; ++s)
            if (!op.sinks_seen.at<bool>()[(b * Z + z) * n + s]) hidden.push_back(first + s);
        // Rows from `base` on; sinks before them.
        T *k = numbers_of<T>(keys, key_rows), *v = numbers_of<T>(values, value_rows);
        take_sources(op.k, op.old_k, sources.data(), count, k + base * Kp, Kp);
        take_sources(op.v, op.old_v, sources.data(), count, v + base * Dp, Dp);
        if (n) {
            take(op.sink_k, state_of(z), 0, g, n, k + first * Kp, Kp);
            take(op.sink_v, state_of(z), 0, g, n, v + first * Dp, Dp);
            if (first % PAIR) clear(k + (first - 1) * Kp, Kp), clear(v + (first - 1) * Dp, Dp);
            panels(k + first * Kp, Kp, n, K, sink_panels);
            if (back) panels(v + first * Dp, Dp, n, D, sink_value_panels);
        }
        panels(k + base * Kp, Kp, count, K, key_panels);
        if (back) panels(v + base * Dp, Dp, count, D, value_panels);
        if (back) across(k, Kp, first, base + count, 0, Kp, keys);
        else across(v, Dp, first, base + count, 0, Dp, values);
    }

    // Rows as factors of products that sum over their columns.
    void panels(const T* x, int64_t ldx, int64_t count, int64_t width, Factor<T>* to) {
        turn<T>(along(x, ldx, 0, count, 0, ldx, left), ldx / PAIR, 0, count, factors(width), to);
    }

    // The first column that the queries see, and where the columns of one query end.
    int64_t start() const { return visible.start; }
    int64_t stop_of(int64_t query) const { return visible.stop + query; }
    void find_stops(int64_t from, int64_t stop) {
        stops.clear();
        for (int64_t query = from; query < stop; ++query)
            stops.insert(stops.end(), size_t(R), stop_of(query));
    }

    // The rows of queries from .. stop in T: R rows for each.
    void take_queries(const Tensor& x, int64_t from, int64_t stop, T* to, int64_t ldx, T factor) {
        for (int64_t i = from; i < stop; ++i) {
            const int64_t token = query_at(i);
            for (int64_t r = 0; r < R; ++r, to += ldx) {
                if (token < 0) clear(to, ldx);
                else take(x, b, token, h0 + r, 1, to, ldx, factor);
            }
        }
    }
    void put_queries(const Tensor& x, int64_t from, int64_t stop, const T* rows, int64_t ldx) {
        for (int64_t i = from; i < stop; ++i) {
            const int64_t token = query_at(i);
            for (int64_t r = 0; r < R; ++r, rows += ldx)
                if (token >= 0) put(x, b, token, h0 + r, 1, rows, ldx);
        }
    }

    // to[i][c] = <x_i, row c> for the sinks and the keys that queries from .. stop see.
    void against(int64_t from, int64_t stop, const T* x, const T* of_sinks, int64_t ldx,
                 int64_t width, const Factor<T>* rows_panels, const Factor<T>* sinks_panels,
                 T* to) {
        const int64_t rows = (stop - from) * R, count = stop_of(stop - 1) - base;
        const int64_t n_factors = factors(width), lda = ldx / PAIR;
        if (n) {
            const Factor<T>* a = along(of_sinks, ldx, 0, rows, 0, ldx, left);
            for (int64_t c = 0; c < n; c += W)
                product(to + first + c, ld, false, rows, W, a, lda, int64_t(1),
                        sinks_panels + c * n_factors, W, n_factors);
        }
        const Factor<T>* a = along(x, ldx, 0, rows, 0, ldx, left);
        for (int64_t c = 0; c < count; c += W)
            for (int64_t i = 0; i < rows; i += ROWS) {
                const int64_t some = least(ROWS, rows - i);
                if (base + c >= stops[size_t(i + some - 1)]) continue;
                tile(some, to + i * ld + base + c, ld, false, a + i * lda, lda, int64_t(1),
                     rows_panels + c * n_factors, W, n_factors);
            }
    }

    // exp(logit - the largest) of queries from .. stop, and the inverse of its sum.
    void weigh(int64_t from, int64_t stop) {
        const int64_t most_seen = stop_of(stop - 1);
        find_stops(from, stop);
        if (far) take_queries(op.latent_q, from, stop, latent_rows, Lq, T(1));
        for (int64_t i = 0; far && i < (stop - from) * R; ++i) {
            const T *own = latent_rows + i * Lq, exact = own[0];
            for (int64_t l = 0; l < L; l += W)
                store_all(logits + i * ld + first - L + l, load_all(own + 1 + l) - exact);
        }
        take_queries(op.q, from, stop, queries, Kp, query_scale);
        if (n) take_queries(op.sink_q, from, stop, sink_queries, Kp, query_scale);
        against(from, stop, queries, sink_queries, Kp, K, key_panels, sink_panels, logits);
        for (int64_t i = 0; i < (stop - from) * R; ++i) {
            T* x = logits + i * ld;
            const int64_t query = from + i / R;
            const Span span = {start(), stop_of(query)}, none = {0, 0};
            const int64_t after = whole<T>(span.stop);
            if (query_at(query) < 0) {
                clear(x + span.first / W * W, most_seen + PAIR - span.first / W * W);
                inverse[i] = 0;
                continue;
            }
            if (PAIR > 1 || op.softcap) scale_scores(x, i, span.stop);
            for (int64_t c : hidden) x[c] = lowest;
            const T total = exponentiate(x, span, none).sum;
            inverse[i] = total == T(0) ? T(0) : T(1) / total;
            if (after < most_seen + PAIR) clear(x + after, most_seen + PAIR - after);
        }
    }

    // The scale of products of pairs, and softcap tanh(x / softcap) with its slope.
    void scale_scores(T* x, int64_t i, int64_t stop) {
        for (int64_t c = first; c < stop; c += W) {
            V<T> y = load_all(x + c) * score_scale;
            if (op.softcap) {
                y = tanh(y * T(1.0 / op.softcap));
                if (back) store_all(slope + i * ld + c, T(1) - y * y);
                y = y * T(op.softcap);
            }
            store_all(x + c, y);
        }
    }

    void forward_queries(int64_t from, int64_t stop) {
        weigh(from, stop);
        const int64_t rows = (stop - from) * R, low = first / PAIR * PAIR;
        const Factor<T>* a = along(logits, ld, 0, rows, low, stop_of(stop - 1), left);
        for (int64_t d = 0; d < Dp; d += W)
            for (int64_t i = 0; i < rows; i += ROWS) {
                const int64_t some = least(ROWS, rows - i);
                tile(some, out + i * Dp + d, Dp, false, a + (i * ld + low) / PAIR, ld / PAIR,
                     int64_t(1), values + low / PAIR * Dp + d, Dp,
                     factors(stops[size_t(i + some - 1)]) - low / PAIR);
            }
        if (start() < first)
            for (int64_t r = 0; r < R; ++r)
                product(out + r * Dp, R * Dp, true, stop - from, Dp, logits + r * ld + first - L,
                        R * ld, int64_t(1), mean + r * L * Dp, Dp, L);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t d = 0; d < Dp; d += W)
                store_all(out + i * Dp + d, load_all(out + i * Dp + d) * inverse[i]);
        put_queries(op.out, from, stop, out, Dp);
    }

    // ---- the latents

    void begin_latents() {
        for (int64_t l = 0; l < RLp; ++l)
            top[l] = -std::numeric_limits<double>::infinity(), mass[l] = 0;
        clear(sum, RLp * Dp);
        clear(mean, RLp * Dp);
    }
    void begin_row() {
        begin_latents();
        if (!op.log_mass) return;
        const int64_t at = (b * op.heads() + h0) * L;
        for (int64_t l = 0; l < RL; ++l) {
            top[l] = double(op.log_mass.at<T>()[at + l]);
            if (op.log_mass.at<T>()[at + l] == lowest) continue;
            mass[l] = 1;
            copy(sum + l * Dp, op.mean.at<T>() + (at + l) * D, D);
        }
        find_mean();
    }

    void find_mean() {
        for (int64_t l = 0; l < RL; ++l) {
            const T share = mass[l] == T(0) ? T(0) : T(1) / mass[l];
            for (int64_t d = 0; d < Dp; d += W)
                store_all(mean + l * Dp + d, load_all(sum + l * Dp + d) * share);
        }
    }

    // The log-decays summed from the start of a sequence through each slot.
    void sum_decays() {
        clear(forgotten, RL * (slot_at(0) + 1));
        for (int64_t block = 0; block < Z; ++block)
            for (int64_t slot = slot_at(block); slot < slot_at(block) + C; ++slot) {
                double* to = forgotten + slot * RL;
                if (slot == slot_at(block) && begins(block)) clear(to, RL);
                else if (slot) copy(to, to - RL, RL);
                const int64_t token = token_of(source_at(slot));
                for (int64_t r = 0; token >= 0 && r < R; ++r) {
                    const Tensor& x = op.log_decay;
                    const T* from = x.at<T>() + place(x, b, token, h0 + r);
                    for (int64_t l = 0; l < L; ++l) to[r * L + l] += double(from[l * x.strides[3]]);
                }
            }
    }
    int64_t slot_at(int64_t block) const { return op.front + block * C; }
    // The log-decays between two slots of a sequence.
    void forget(int64_t from, int64_t to) {
        for (int64_t l = 0; l < RL; ++l)
            top[l] += forgotten[to * RL + l] - forgotten[from * RL + l];
    }
    // The log-decay of a source from when it left the window until a block.
    void add_forgotten(int64_t block, int64_t slot, double* to) const {
        const double *now = forgotten + slot_at(block) * RL, *then = forgotten + leaving(slot) * RL;
        for (int64_t l = 0; l < RL; ++l) to[l] += now[l] - then[l];
        const int64_t source = source_at(slot);
        if (source >= op.old()) return;
        const Tensor& x = op.old_log_decay;
        for (int64_t r = 0; r < R; ++r)
            for (int64_t l = 0; l < L; ++l)
                to[r * L + l] += double(x.at<T>()[place(x, b, source, h0 + r) + l * x.strides[3]]);
    }
    int64_t leaving(int64_t slot) const { return least(slot + op.window, op.slots() - 1); }

    // The sources that the latents read at a block's update: slots, values, logits and the largest
    // logits.
    void load_late(int64_t block) {
        read.clear();
        const int64_t at = plan_at(block, C);
        for (int64_t i = 0; i < C; ++i)
            if (op.late_there.at<bool>()[at + i]) {
                const int64_t slot = slot_of(op.late.at<int64_t>()[at + i]);
                if (source_at(slot) >= 0) read.push_back(slot);
            }
        for (int64_t l = 0; l < RL; ++l) highest[l] = top[l];
        for (size_t i = 0; i < read.size(); ++i) {
            const int64_t source = source_at(read[i]), past = source < op.old();
            take_sources(op.v, op.old_v, &source, 1, late_v + int64_t(i) * Dp, Dp);
            const Tensor& x = past ? op.old_latent_k : op.latent_k;
            const int64_t row = past ? source : token_of(source);
            double* own = raw + int64_t(i) * RLp;
            for (int64_t r = 0; r < R; ++r) {
                const int64_t h = h0 + r;
                gather(x, place(x, b, row, h), x.strides[3], L, e);
                for (int64_t l = 0; l < L; ++l) own[r * L + l] = double(e[l]);
            }
            if (forgets) add_forgotten(block, read[i], own);
            for (int64_t l = 0; l < RL; ++l) highest[l] = std::max(highest[l], own[l]);
        }
    }
    // exp(logit - the largest logit read so far).
    void scale_late() {
        for (int64_t i = 0; i < int64_t(read.size()); ++i) {
            T* own = e + i * RLp;
            for (int64_t l = 0; l < RL; ++l)
                own[l] = highest[l] == -std::numeric_limits<double>::infinity()
                             ? lowest
                             : T(raw[i * RLp + l] - highest[l]);
            for (int64_t l = RL; l < RLp; ++l) own[l] = lowest;
            for (int64_t l = 0; l < RLp; l += W) store_all(own + l, decay(load_all(own + l)).kept);
        }
    }

    // The latents after a block's update.
    void advance(int64_t block) {
        if (begins(block)) begin_latents();
        for (int64_t l = 0; l < RL; ++l) remains[l] = 1;
        if (forgets && !begins(block)) forget(block ? slot_at(block - 1) : 0, slot_at(block));
        load_late(block);
        if (read.empty()) return;
        scale_late();
        for (int64_t l = 0; l < RL; ++l) {
            if (highest[l] == top[l]) continue;
            remains[l] = T(std::exp(top[l] - highest[l]));
            top[l] = highest[l], mass[l] *= remains[l];
            for (int64_t d = 0; d < Dp; ++d) sum[l * Dp + d] *= remains[l];
        }
        const int64_t count = int64_t(read.size());
        for (int64_t l = 0; l < RLp; l += W) {
            V<T> total = load_all(mass + l);
            for (int64_t i = 0; i < count; ++i) total = total + load_all(e + i * RLp + l);
            store_all(mass + l, total);
        }
        product(sum, Dp, true, RL, Dp, e, int64_t(1), RLp, late_v, Dp, count);
        find_mean();
    }

    int64_t saved_at(int64_t block) const {
        return ((b * op.segments() + block / op.together()) * op.heads() + h0) * L;
    }
    void save(int64_t block) {
        const int64_t at = saved_at(block);
        copy(op.saved_top.at<double>() + at, top, RL);
        copy(op.saved_mass.at<T>() + at, mass, RL);
        copy_rows(op.saved_sum.at<T>() + at * D, D, sum, Dp, RL, D);
    }

    void take_saved(int64_t block) {
        const int64_t at = saved_at(block);
        copy(top, op.saved_top.at<double>() + at, RL);
        copy(mass, op.saved_mass.at<T>() + at, RL);
        copy_rows(sum, Dp, op.saved_sum.at<T>() + at * D, D, RL, D);
        find_mean();
    }

    // The state of a sequence, after its last block.
    void put_state(int64_t state, int64_t block) {
        if (forgets && block >= 0) forget(slot_at(block), slot_at(block) + C - 1);
        const int64_t at = (state * op.heads() + h0) * L;
        for (int64_t l = 0; l < RL; ++l) {
            op.last_mass.at<T>()[at + l] =
                mass[l] == T(0) ? lowest : T(top[l] + double(std::log(mass[l])));
            copy(op.last_mean.at<T>() + (at + l) * D, mean + l * Dp, D);
        }
    }

    void begin_task(int64_t row, int64_t which) {
        b = row, set = which, h0 = which * R, g = h0 / (op.heads() / op.groups());
    }
    void forward(int64_t row, int64_t which) {
        begin_task(row, which);
        if (far) begin_row();
        if (forgets) sum_decays();
        for (int64_t block = 0; block < Z; ++block) {
            if (far && block % op.together() == 0) save(block);
            if (far) advance(block);
            load_block(block);
            for (int64_t from = 0; from < rows_in_all; from += together)
                forward_queries(from, least(from + together, rows_in_all));
            if (!far) continue;
            if (ends(block)) put_state(state_of(block), block);
        }
        if (!far) return;
        begin_latents();
        for (int64_t s = 0; op.ends && s < op.states(); ++s)
            if (op.ends.at<int64_t>()[s] < 0) put_state(s, -1);
    }

    // ---- the backward pass

    // A block's queries from .. stop: gradients of them, of the keys and of the latents' means.
    void backward_queries(int64_t from, int64_t stop) {
        weigh(from, stop);
        take_queries(op.dout, from, stop, dy, Dp, T(1));
        const int64_t count = stop - from, rows = count * R, end = stop_of(stop - 1);
        const bool latents = start() < first;
        const int64_t Lw = whole<T>(L);
        for (int64_t r = 0; latents && r < R; ++r)
            product(pairs + r * ld + first - L, R * ld, false, count, Lw, dy + r * Dp, R * Dp,
                    int64_t(1), turned + r * D * Lw, Lw, D);
        against(from, stop, dy, dy, Dp, D, value_panels, sink_value_panels, pairs);
        for (int64_t i = 0; i < rows; ++i) through_softmax(i, from + i / R, end, latents);
        for (int64_t r = 0; latents && r < R; ++r)
            product(dmean + r * L * Dp, Dp, true, L, Dp, logits + r * ld + first - L, int64_t(1),
                    R * ld, dy + r * Dp, R * Dp, count);
        if (far) put_queries(op.dlatent_q, from, stop, latent_rows, Lq);
        to_keys(from, stop, first, end, logits, dy, Dp, dvalues);
        to_keys(from, stop, base, end, pairs, queries, Kp, dkeys);
        to_queries(from, stop, base, end, queries);
        put_queries(op.dq, from, stop, queries, Kp);
        if (!n) return;
        to_keys(from, stop, first, base, pairs, sink_queries, Kp, dkeys);
        to_queries(from, stop, first, base, sink_queries);
        put_queries(op.dsink_q, from, stop, sink_queries, Kp);
    }

    // Reads exponentials in `logits` and <dy, v> in `pairs`. Writes the gradients of the scores to
    // `pairs`, those of latent_q to its place, and dy divided by the sum.
    void through_softmax(int64_t i, int64_t query, int64_t end, bool latents) {
        T *x = logits + i * ld, *y = pairs + i * ld, *to = latent_rows + i * Lq;
        const Span span = {start(), stop_of(query)};
        const int64_t from = span.first / W * W, after = whole<T>(span.stop);
        if (query_at(query) < 0) return clear(y + from, end + PAIR - from);
        V<T> sums{};
        for (int64_t c = from; c < span.stop; c += W)
            sums =
                sums + within(load_all(x + c) * load_all(y + c), V<T>{}, c, span.first, span.stop);
        const T share = inverse[i], total = share * added(sums);
        for (int64_t l = 0; far && l < L; l += W) {
            const int64_t c = first - L + l;
            const V<T> dx = latents ? load_all(x + c) * share * (load_all(y + c) - total) : V<T>{};
            store_all(to + 1 + l, within(dx, V<T>{}, l, 0, L));
        }
        T exact = 0;
        for (int64_t l = 0; l < L; ++l) exact -= to[1 + l];
        to[0] = exact;
        for (int64_t c = first / W * W; c < span.stop; c += W) {
            V<T> dx = load_all(x + c) * (share * score_scale) * (load_all(y + c) - total);
            if (op.softcap) dx = dx * load_all(slope + i * ld + c);
            store_all(y + c, within(dx, V<T>{}, c, first, span.stop));
        }
        if (after < end + PAIR) clear(y + after, end + PAIR - after);
        for (int64_t d = 0; d < Dp; d += W)
            store_all(dy + i * Dp + d, load_all(dy + i * Dp + d) * share);
    }

    // Adds the sum over queries of x[i][c] y_i to the gradients of the columns.
    void to_keys(int64_t from, int64_t stop, int64_t begin_at, int64_t end, const T* x, const T* y,
                 int64_t ldy, T* to) {
        const int64_t rows = (stop - from) * R;
        const Factor<T>* a = across(x, ld, 0, rows, begin_at, end, left);
        const Factor<T>* of = across(y, ldy, 0, rows, 0, ldy, right);
        for (int64_t d = 0; d < ldy; d += W)
            for (int64_t c = begin_at; c < end; c += ROWS) {
                // The first query that sees a column sees all columns before it too.
                const int64_t query = c + 1 - stop_of(0);
                const int64_t row = least(most(0, query - from), stop - from) * R / PAIR;
                tile(least(ROWS, end - c), to + c * ldy + d, ldy, true, a + row * ld + c,
                     int64_t(1), ld, of + row * ldy + d, ldy, factors(rows) - row);
            }
    }

    // Overwrites queries with the sum over columns of the scores' gradients times the keys.
    void to_queries(int64_t from, int64_t stop, int64_t begin_at, int64_t end, T* to) {
        const int64_t rows = (stop - from) * R, low = begin_at / PAIR * PAIR;
        const Factor<T>* a = along(pairs, ld, 0, rows, low, end, left);
        for (int64_t d = 0; d < Kp; d += W)
            for (int64_t i = 0; i < rows; i += ROWS) {
                const int64_t some = least(ROWS, rows - i);
                const int64_t last = least(end, stops[size_t(i + some - 1)]);
                tile(some, to + i * Kp + d, Kp, false, a + (i * ld + low) / PAIR, ld / PAIR,
                     int64_t(1), keys + low / PAIR * Kp + d, Kp, factors(last) - low / PAIR);
            }
        for (int64_t i = 0; i < rows * Kp; i += W)
            store_all(to + i, load_all(to + i) * query_scale);
    }

    // Adds rows to the gradients of sources, block by block from the last one.
    void add_to(const Tensor& x, const Tensor& old, int64_t source, const T* from) {
        const bool past = source < op.old();
        const Tensor& all_of = past ? old : x;
        add_row(all_of, b, past ? source : token_of(source), from);
    }
    void add_row(const Tensor& x, int64_t row, int64_t at, const T* from) {
        T* to = x.at<T>() + place(x, row, at, set);
        const int64_t count = x.sizes[3];
        for (int64_t d = 0; d < count; d += W)
            store(to + d, load(to + d, 1, count - d) + load_all(from + d), count - d);
    }

    void backward_block(int64_t block, int64_t j) {
        const T* means_now = means + j * RLp * Dp;
        const int64_t Lw = whole<T>(L);
        clear(dmean, RLp * Dp);
        load_block(block);
        if (rows_in_all) {
            const int64_t count = int64_t(sources.size());
            clear(dkeys + first * Kp, (n + count) * Kp);
            clear(dvalues + first * Dp, (n + count) * Dp);
            for (int64_t r = 0; far && r < R; ++r)
                transpose(means_now + r * L * Dp, Dp, 0, L, D, turned + r * D * Lw, Lw);
            for (int64_t from = 0; from < rows_in_all; from += together)
                backward_queries(from, least(from + together, rows_in_all));
            for (int64_t c = 0; c < count; ++c) {
                const int64_t source = sources[size_t(c)];
                if (source < 0) continue;
                add_to(op.dk, op.dold_k, source, dkeys + (base + c) * Kp);
                add_to(op.dv, op.dold_v, source, dvalues + (base + c) * Dp);
            }
            for (int64_t s = 0; s < n; ++s) {
                add_row(op.dsink_k, state_of(block), s, dkeys + (first + s) * Kp);
                add_row(op.dsink_v, state_of(block), s, dvalues + (first + s) * Dp);
            }
        }
        if (far) backward_latents(block, j);
    }

    // Adds the gradients of a mean and of a log-mass after an update to R and n.
    void add_reverse(int64_t l, T share, const T* mean_l, const T* dmean_l, int64_t step, T dmass) {
        if (share == T(0)) return;
        T total = 0;
        for (int64_t d = 0; d < D; ++d) {
            reverse[l * Dp + d] += share * dmean_l[d * step];
            total += dmean_l[d * step] * mean_l[d];
        }
        scalar[l] += share * (dmass - total);
    }
    void add_end(int64_t state, int64_t end_slot, const T* mass_now, const T* means_now) {
        const Tensor &dm = op.dlast_mass, &dmu = op.dlast_mean;
        for (int64_t l = 0; l < RL; ++l) {
            const int64_t h = h0 + l / L, at = l % L;
            const T share = mass_now[l] == T(0) ? T(0) : T(1) / mass_now[l];
            const T dmass = dm.at<T>()[place(dm, state, h, at)];
            add_reverse(l, share, means_now + l * Dp, dmu.at<T>() + place(dmu, state, h, at),
                        dmu.strides[3], dmass);
            if (forgets && share != T(0)) dforgotten[end_slot * RL + l] += double(dmass);
        }
    }

    void backward_latents(int64_t block, int64_t j) {
        const T *mass_now = masses + j * RLp, *means_now = means + j * RLp * Dp;
        for (int64_t l = 0; l < RL; ++l)
            add_reverse(l, mass_now[l] == T(0) ? T(0) : T(1) / mass_now[l], means_now + l * Dp,
                        dmean + l * Dp, 1, T(0));
        if (ends(block)) add_end(state_of(block), slot_at(block) + C - 1, mass_now, means_now);
        copy(top, tops + j * RLp, RL);
        load_late(block);
        const int64_t count = int64_t(read.size());
        if (count) {
            scale_late();
            transpose(reverse, Dp, 0, RL, D, turned, RLp);
            product(dlate, RLp, false, count, RLp, late_v, Dp, int64_t(1), turned, RLp, D);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t l = 0; l < RLp; l += W)
                    store_all(dlate + i * RLp + l,
                              load_all(e + i * RLp + l) *
                                  (load_all(dlate + i * RLp + l) + load_all(scalar + l)));
            for (int64_t i = 0; i < count; ++i) put_late(read[size_t(i)], dlate + i * RLp);
            product(dlate, Dp, false, count, Dp, e, RLp, int64_t(1), reverse, Dp, RL);
            for (int64_t i = 0; i < count; ++i)
                add_to(op.dv, op.dold_v, source_at(read[size_t(i)]), dlate + i * Dp);
        }
        const bool begun_here = begins(block);
        for (int64_t l = 0; l < RL; ++l) {
            const T share = begun_here ? T(0) : left_of[j * RLp + l];
            if (share == T(1)) continue;
            scalar[l] = share == T(0) ? T(0) : scalar[l] * share;
            for (int64_t d = 0; d < Dp; ++d)
                reverse[l * Dp + d] = share == T(0) ? T(0) : reverse[l * Dp + d] * share;
        }
    }

    // The gradients of the logits of a source that the latents have read, and of its log-decays.
    // The log-decays up to the block are shared by all sources of a mean.
    void put_late(int64_t slot, const T* from) {
        const int64_t source = source_at(slot);
        const bool past = source < op.old();
        const Tensor& x = past ? op.dold_latent_k : op.dlatent_k;
        for (int64_t r = 0; r < R; ++r) {
            copy(dmean, from + r * L, L);  // not used any more
            put(x, b, past ? source : token_of(source), h0 + r, 1, dmean, whole<T>(L));
        }
        if (!forgets) return;
        for (int64_t l = 0; l < RL; ++l) dforgotten[leaving(slot) * RL + l] -= double(from[l]);
        if (!past) return;
        const Tensor& lost = op.dold_log_decay;
        copy(lost.at<T>() + place(lost, b, source, h0), from, RL);
    }

    // The states after the updates of a segment's blocks: a second forward pass.
    void walk_segment(int64_t begin_at, int64_t stop) {
        take_saved(begin_at);
        for (int64_t block = begin_at; block < stop; ++block) {
            const int64_t j = block - begin_at;
            advance(block);
            copy(masses + j * RLp, mass, RLp), copy(left_of + j * RLp, remains, RLp);
            copy(tops + j * RLp, top, RLp), copy(means + j * RLp * Dp, mean, RLp * Dp);
        }
    }

    void backward(int64_t row, int64_t which) {
        begin_task(row, which);
        begin_latents();
        if (forgets) sum_decays(), clear(dforgotten, op.slots() * RL);
        clear(reverse, (RLp + W) * Dp);
        clear(scalar, RLp);
        const int64_t X = op.together();
        for (int64_t begin_at = (Z - 1) / X * X; begin_at >= 0; begin_at -= X) {
            const int64_t stop = least(Z, begin_at + X);
            if (far) walk_segment(begin_at, stop);
            for (int64_t block = stop - 1; block >= begin_at; --block)
                backward_block(block, block - begin_at);
        }
        if (op.log_mass) put_begin();
        if (forgets) put_decays();
    }

    // A log-decay is part of the sums up to all later slots of its sequence.
    void put_decays() {
        for (int64_t block = Z - 1; block >= 0; --block)
            for (int64_t slot = slot_at(block) + C - 1; slot >= slot_at(block); --slot) {
                double* own = dforgotten + slot * RL;
                const bool last =
                    slot == op.slots() - 1 || (slot == slot_at(block) + C - 1 && begins(block + 1));
                for (int64_t l = 0; !last && l < RL; ++l) own[l] += own[RL + l];
                const int64_t token = token_of(source_at(slot));
                if (token < 0) continue;
                const Tensor& x = op.dlog_decay;
                T* to = x.at<T>() + place(x, b, token, h0);
                for (int64_t l = 0; l < RL; ++l) to[l] = T(own[l]);
            }
    }

    // The gradients of the state before; zero of an empty one.
    void put_begin() {
        const int64_t at = (b * op.heads() + h0) * L;
        for (int64_t l = 0; l < RL; ++l) {
            const bool empty = op.log_mass.at<T>()[at + l] == lowest;
            const T* mean_l = op.mean.at<T>() + (at + l) * D;
            T *to = op.dmean.at<T>() + (at + l) * D, total = empty ? T(0) : scalar[l];
            for (int64_t d = 0; d < D; ++d) {
                to[d] = empty ? T(0) : reverse[l * Dp + d];
                if (!empty) total += to[d] * mean_l[d];
            }
            op.dlog_mass.at<T>()[at + l] = total;
        }
    }
};

// Calls (head.*work)(row, set) for each row and set.
static void every_set(const KeptAttention& op, bool back,
                      void (KeptHead::*work)(int64_t, int64_t)) {
    parallel_tasks(op.batch() * op.sets, [&](Tasks& tasks) {
        KeptHead head(op, back);
        for (int64_t task = tasks.next(); task >= 0; task = tasks.next())
            (head.*work)(task / op.sets, task % op.sets);
    });
}
static void run_forward_in(const KeptAttention& op) { every_set(op, false, &KeptHead::forward); }
static void run_backward_in(const KeptAttention& op) { every_set(op, true, &KeptHead::backward); }

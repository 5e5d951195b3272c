// Which tokens are kept from each update to the next (torch_backend/kept_plan.py). The keys of what
// is kept stay in their order; those that leave the window are sorted and merged with them.
//
// Shapes: B batch, G key/value heads, S slots, Z blocks of C tokens, N kept tokens.

#include <utility>

#include "expect.h"
#include "torch_abi.h"

namespace latte {

struct KeptChoice {
    Tensor keys, age;                           // (B, G, S), (Z,)
    Tensor kept, kept_there, late, late_there;  // (B, G, Z+1, N) x 2, (B, G, Z, C) x 2
    int64_t blocks = 0, block = 0, window = 0, count = 0;

    int64_t slots() const { return keys.sizes[2]; }
    int64_t front() const { return slots() - blocks * block; }
};

template <class T> struct Candidate {
    T key;
    int64_t slot;
    static bool larger(const Candidate& x, const Candidate& y) { return x.key > y.key; }
};

// One row and group.
template <class T>
static void choose(const KeptChoice& op, int64_t row) {
    using One = Candidate<T>;
    constexpr T nothing = std::numeric_limits<T>::lowest();  // the key where there is no candidate
    const int64_t N = op.count, C = op.block, Z = op.blocks, *age = op.age.at<int64_t>();
    const T* keys = op.keys.at<T>() + row * op.slots();
    const auto write = [](const One* from, int64_t count, int64_t* slots, bool* there, auto is) {
        for (int64_t i = 0; i < count; ++i) slots[i] = from[i].slot, there[i] = is(from[i].key);
    };
    const auto write_kept = [&](const One* from, int64_t z) {
        const int64_t at = (row * (Z + 1) + z) * N;
        write(from, N, op.kept.at<int64_t>() + at, op.kept_there.at<bool>() + at,
              [](T key) { return key > nothing; });
    };
    std::vector<One> kept(static_cast<size_t>(N)), leaving(static_cast<size_t>(C));
    std::vector<One> both(static_cast<size_t>(N + C));
    for (int64_t i = 0; i < N; ++i) kept[size_t(i)] = {keys[i], i};
    write_kept(kept.data(), 0);
    std::stable_sort(kept.begin(), kept.end(), One::larger);
    for (int64_t z = 0; z < Z; ++z) {
        int64_t lowest = N;
        if (age) {
            lowest = std::max(lowest, op.front() + C * (z - age[z]));
            if (age[z] == 0)  // a sequence begins
                for (One& each : kept) each.key = nothing;
        }
        for (int64_t c = 0; c < C; ++c) {  // the newest first
            const int64_t slot = op.front() - op.window + C * z - c;
            leaving[size_t(c)] = {slot >= lowest ? keys[slot] : nothing, std::max(slot, N)};
        }
        std::stable_sort(leaving.begin(), leaving.end(), One::larger);
        std::merge(leaving.begin(), leaving.end(), kept.begin(), kept.end(), both.begin(),
                   One::larger);
        std::copy(both.begin(), both.begin() + N, kept.begin());
        write_kept(both.data(), z + 1);
        const int64_t at = (row * Z + z) * C;
        write(both.data() + N, C, op.late.at<int64_t>() + at, op.late_there.at<bool>() + at,
              [](T key) { return key != nothing; });
    }
}

// (keys, age, numbers) -> kept, kept_there, late, late_there
static void take_choice(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    KeptChoice op;
    op.keys = stack.tensor(), op.age = stack.maybe_tensor();
    op.blocks = stack.integer(), op.block = stack.integer(), op.window = stack.integer();
    op.count = stack.integer();
    const Expect expect("cpu_kept_choice");
    expect(op.keys, "keys", FLOATS, {ANY, ANY, ANY}, Layout::contiguous);
    expect.that(op.keys.dtype == wide(op.keys), "keys must be float32 or float64");
    expect(op.age, "age", aoti_torch_dtype_int64(), {op.blocks}, Layout::contiguous);
    expect.that(op.blocks >= 1 && op.block >= 1 && op.window >= 1 && op.count >= 0,
                "blocks, block and window must be at least 1, and kept at least 0");
    expect.that(op.slots() / op.block >= op.blocks && op.front() >= op.count,
                "keys must have slots for the kept tokens and all blocks");
    expect.between(op.age, "age", 0, op.blocks - 1);
    const int64_t B = op.keys.sizes[0], G = op.keys.sizes[1], Z = op.blocks;
    const int32_t place = aoti_torch_dtype_int64(), flag = aoti_torch_dtype_bool();
    op.kept = Tensor::empty({B, G, Z + 1, op.count}, place);
    op.kept_there = Tensor::empty({B, G, Z + 1, op.count}, flag);
    op.late = Tensor::empty({B, G, Z, op.block}, place);
    op.late_there = Tensor::empty({B, G, Z, op.block}, flag);
    parallel(B * G, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            if (op.keys.type() == Type::F64) choose<double>(op, row);
            else choose<float>(op, row);
        }
    });
    stack.give(op.kept, op.kept_there, op.late, op.late_there);
}

static Register registered_choice("cpu_kept_choice", take_choice);

}  // namespace latte

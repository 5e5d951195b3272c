// Rows of numbers in 8 bits (latte/ops/mxint8.py): packed, unpacked, and rounded to what they hold.
//
// Tensors are contiguous, and their last dimension is a row.
#ifndef LATTE_MXINT8
#define LATTE_MXINT8

#include "expect.h"
#include "torch_abi.h"

namespace latte {

struct MxRows {
    Tensor x, packed, out;  // (..., n), (..., n + ceil(n / 32)) uint8, (..., n)
    int64_t rows = 0, size = 0;
};

}  // namespace latte

#define LATTE_FILE "mxint8.cpp"
#include "each_isa.h"

namespace latte {

static Tensor sized(const Tensor& x, int64_t last, int32_t dtype) {
    std::vector<int64_t> shape(x.sizes, x.sizes + x.dims);
    shape.back() = last;
    return Tensor::empty(shape.data(), x.dims, dtype);
}

static void check_rows(const Expect& expect, MxRows& op) {
    const Tensor& x = op.x ? op.x : op.packed;
    expect(op.x, "x", FLOATS, op.x, Layout::contiguous);
    expect(op.packed, "rows", aoti_torch_dtype_uint8(), op.packed, Layout::contiguous);
    expect.that(x.dims > 0, "rows must have at least one dimension");
    const int64_t width = x.sizes[x.dims - 1];
    op.size = op.x ? width : width - (width + 32) / 33;
    op.rows = width ? count_of(x) / width : 0;
}

// x -> rows
static void pack(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    MxRows op;
    op.x = stack.tensor();
    check_rows(Expect("cpu_mx_pack"), op);
    op.packed = sized(op.x, op.size + (op.size + 31) / 32, aoti_torch_dtype_uint8());
    LATTE_CHOOSE(run_rows)(op);
    stack.give(op.packed);
}

// (rows, a tensor of the result's dtype) -> x
static void unpack(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    MxRows op;
    op.packed = stack.tensor();
    Tensor like = stack.tensor();
    const Expect expect("cpu_mx_unpack");
    check_rows(expect, op);
    expect(like, "like", FLOATS, like);
    op.out = sized(op.packed, op.size, like.dtype);
    LATTE_CHOOSE(run_rows)(op);
    stack.give(op.out);
}

// x -> the nearest numbers of the format
static void round_rows(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    MxRows op;
    op.x = stack.tensor();
    check_rows(Expect("cpu_mx_rounded"), op);
    op.out = sized(op.x, op.size, op.x.dtype);
    LATTE_CHOOSE(run_rows)(op);
    stack.give(op.out);
}

static Register registered_pack("cpu_mx_pack", pack);
static Register registered_unpack("cpu_mx_unpack", unpack);
static Register registered_rounded("cpu_mx_rounded", round_rows);

}  // namespace latte

#else  // once per instruction set

#include "rows.h"
#include "mxint8.h"

template <class S>
static void apply_rows(MxRows& op) {
    using T = typename Computed<S>::type;
    const int64_t n = op.size, bytes = row_size<mxint8>(n);
    const S* x = op.x.at<S>();
    mxint8* packed = op.packed.at<mxint8>();
    S* out = op.out.at<S>();
    parallel(op.rows, 1 + 8192 / (1 + n), [&](int64_t begin, int64_t end) {
        std::vector<T> numbers(static_cast<size_t>(whole<T>(n)));
        std::vector<mxint8> own(static_cast<size_t>(bytes));
        for (int64_t row = begin; row < end; ++row) {
            mxint8* held = packed ? packed + row * bytes : own.data();
            if (x) {
                read_row(x + row * n, n, numbers.data());
                write_row<T>(numbers.data(), n, held);
            }
            if (out) {
                read_row(held, n, numbers.data());
                write_row<S>(numbers.data(), n, out + row * n);
            }
        }
    });
}

static void run_rows(MxRows& op) {
    const Tensor& like = op.x ? op.x : op.out;
    by_dtype(like.type(), [&](auto s) { apply_rows<decltype(s)>(op); });
}

#endif

// Checks of the arguments of an op. An op can be called with any arguments, and a compiled graph
// may pass values that nothing has checked before. A wrong argument raises an error (a ValueError
// in Python) of one line. It says what the op expected and what it received. The op never reads
// memory outside a tensor.
#pragma once

#include "torch_abi.h"

namespace latte {

constexpr int64_t ANY = -1;     // of a size: whatever it is
constexpr int32_t FLOATS = -1;  // of a dtype: any of those that the kernels are made for

enum class Layout { strided, contiguous };

inline std::string shape_text(const int64_t* sizes, int64_t dims) {
    std::string all;
    for (int64_t d = 0; d < dims; ++d)
        all += (d ? ", " : "") + (sizes[d] == ANY ? "*" : std::to_string(sizes[d]));
    return "(" + all + (dims == 1 ? ",)" : ")");
}

inline int64_t count_of(const Tensor& x) {
    int64_t count = 1;
    for (int64_t d = 0; d < x.dims; ++d) count *= x.sizes[d];
    return count;
}

inline bool is_contiguous(const Tensor& x) {
    int64_t step = 1;
    for (int64_t d = x.dims - 1; d >= 0; step *= x.sizes[d--])
        if (x.sizes[d] > 1 && x.strides[d] != step) return !count_of(x);
    return true;
}

inline bool is_float(int32_t dtype) {
    return dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_bfloat16() ||
           dtype == aoti_torch_dtype_float64() || dtype == aoti_torch_dtype_float16();
}

inline std::string name_of(int32_t dtype) {
    if (dtype == FLOATS) return "float32, float64, bfloat16 or float16";
    if (dtype == aoti_torch_dtype_float32()) return "float32";
    if (dtype == aoti_torch_dtype_float64()) return "float64";
    if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
    if (dtype == aoti_torch_dtype_float16()) return "float16";
    if (dtype == aoti_torch_dtype_int64()) return "int64";
    if (dtype == aoti_torch_dtype_int32()) return "int32";
    if (dtype == aoti_torch_dtype_int8()) return "int8";
    if (dtype == aoti_torch_dtype_uint8()) return "uint8";
    if (dtype == aoti_torch_dtype_bool()) return "bool";
    return "another dtype";
}

// The checks of one op. They accept the absence of a tensor that is optional.
class Expect {
public:
    explicit Expect(const char* name) : op(name) {}

    void operator()(const Tensor& x, const char* name, int32_t dtype,
                    std::initializer_list<int64_t> shape, Layout layout = Layout::strided) const {
        of_shape(x, name, dtype, shape.begin(), int64_t(shape.size()), layout);
    }
    void operator()(const Tensor& x, const char* name, int32_t dtype,
                    const std::vector<int64_t>& shape, Layout layout = Layout::strided) const {
        of_shape(x, name, dtype, shape.data(), int64_t(shape.size()), layout);
    }
    void operator()(const Tensor& x, const char* name, int32_t dtype, const Tensor& like,
                    Layout layout = Layout::strided) const {
        of_shape(x, name, dtype, like.sizes, like.dims, layout);
    }
    // Any other condition, in words.
    void that(bool holds, const char* condition) const {
        if (!holds) fail(condition);
    }
    // Either all of these are given or none.
    void together(std::initializer_list<const Tensor*> tensors, const char* names) const {
        for (const Tensor* x : tensors)
            if (bool(*x) != bool(**tensors.begin()))
                fail(std::string(names) + " must be given together, or none of them");
    }
    // Each number of a contiguous int64 tensor.
    void between(const Tensor& x, const char* name, int64_t least, int64_t most) const {
        for (int64_t i = 0, count = x ? count_of(x) : 0; i < count; ++i) {
            const int64_t number = x.at<int64_t>()[i];
            if (number < least || number > most)
                fail(std::string(name) + " must be from " + std::to_string(least) + " to " +
                     std::to_string(most) + ", got " + std::to_string(number));
        }
    }
    // The mask and the bounds of the sequences in x (B, T, ...): (B, T) and N + 1 numbers that rise
    // from 0 to T.
    void sequences(const Tensor& x, const Tensor& mask, const Tensor& bounds) const {
        const int64_t B = x.sizes[0], T = x.sizes[1];
        (*this)(mask, "mask", aoti_torch_dtype_bool(), {B, T}, Layout::contiguous);
        if (!bounds) return;
        (*this)(bounds, "cu_seqlens", aoti_torch_dtype_int64(), {ANY}, Layout::contiguous);
        const int64_t N = bounds.sizes[0] - 1, *numbers = bounds.at<int64_t>();
        that(N >= 1, "cu_seqlens must hold N + 1 numbers with N >= 1");
        that(B == 1, "packed sequences (cu_seqlens) need a batch of 1");
        bool rises = numbers[0] == 0 && numbers[N] == T;
        for (int64_t n = 0; n < N; ++n) rises = rises && numbers[n] <= numbers[n + 1];
        if (rises) return;
        std::string got;
        for (int64_t n = 0; n < N && n < 3; ++n) got += std::to_string(numbers[n]) + ", ";
        fail("cu_seqlens must rise from 0 to T=" + std::to_string(T) + ", got [" + got +
             (N > 3 ? "..., " : "") + std::to_string(numbers[N]) + "]");
    }

private:
    const char* op;

    void of_shape(const Tensor& x, const char* name, int32_t dtype, const int64_t* sizes,
                  int64_t dims, Layout layout) const {
        if (!x) return;
        bool fits = x.dims == dims && (dtype == FLOATS ? is_float(x.dtype) : x.dtype == dtype);
        for (int64_t d = 0; fits && d < dims; ++d) fits = sizes[d] == ANY || sizes[d] == x.sizes[d];
        if (!fits)
            fail(std::string(name) + " must be " + name_of(dtype) + " of shape " +
                 shape_text(sizes, dims) + ", got " + name_of(x.dtype) + " of shape " +
                 shape_text(x.sizes, x.dims));
        if (layout == Layout::contiguous && !is_contiguous(x))
            fail(std::string(name) + " must be contiguous");
    }

    [[noreturn]] __attribute__((noinline, cold)) void fail(const std::string& message) const {
        throw std::invalid_argument("latte::" + std::string(op) + ": " + message);
    }
};

}  // namespace latte

// PyTorch's stable C interface, as far as the kernels use it, and the arguments of a kernel.
//
// The declarations are those of torch/csrc/stable/c/shim.h and of torch/csrc/inductor/aoti_torch/c/
// shim.h, which keep their meaning from PyTorch 2.10 on; a test compiles both together, so that a
// difference is an error there. With the declarations here, the library can be built without
// PyTorch, and one library works with every version. This matters because pip builds a package
// before it installs the package's dependencies.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/mman.h>

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
using StableIValue = uint64_t;
using AOTITorchError = int32_t;

extern "C" {
typedef void (*ParallelFunc)(int64_t begin, int64_t end, void* ctx);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_bool();
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle orig_handle,
                                            AtenTensorHandle* new_handle);
AOTITorchError torch_list_size(StableListHandle list_handle, size_t* size);
AOTITorchError torch_list_get_item(StableListHandle list_handle, size_t index,
                                   StableIValue* element);
AOTITorchError torch_delete_list(StableListHandle list_handle);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* ret_dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** ret_sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** ret_strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* ret_dtype);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* ret_new_tensor);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* k, const char* file,
                                            uint32_t line, TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name,
                                  void (*fn)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t extension_build_version);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** ret_data_ptr);
AOTITorchError torch_get_num_threads(uint32_t* out_num_threads);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc func,
                                  void* ctx);
// Why the last call on this thread failed. Null before PyTorch 2.13, which writes it to stderr.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
}

namespace latte {

// Reports PyTorch's own message about a call that failed.
inline void check(AOTITorchError error) {
    if (!error) return;
    const char* what = torch_exception_get_what_without_backtrace
                           ? torch_exception_get_what_without_backtrace()
                           : "PyTorch refused a call of its C interface, see its message on stderr";
    throw std::runtime_error(std::string("latte: ") + what);
}

enum class Type { F32, F64, BF16, F16 };

inline constexpr int64_t NOTHING[5] = {};  // sizes and strides of a tensor that is not there

// A tensor, or none (handle == nullptr).
struct Tensor {
    AtenTensorHandle handle = nullptr;
    char* data = nullptr;
    int64_t dims = 0;
    const int64_t *sizes = NOTHING, *strides = NOTHING;  // PyTorch's own, of any number
    int32_t dtype = 0;

    Tensor() = default;
    // For reading, unless it is `written`. A request for memory to write copies a tensor that still
    // shares its memory (copy-on-write).
    explicit Tensor(AtenTensorHandle owned, bool written = false) : handle(owned) {
        int64_t *size, *stride;
        if (written) {
            void* pointer;
            check(torch_get_mutable_data_ptr(handle, &pointer));
            data = static_cast<char*>(pointer);
        } else {
            const void* pointer;
            check(torch_get_const_data_ptr(handle, &pointer));
            data = static_cast<char*>(const_cast<void*>(pointer));
        }
        check(aoti_torch_get_dim(handle, &dims));
        check(aoti_torch_get_sizes(handle, &size));
        check(aoti_torch_get_strides(handle, &stride));
        check(aoti_torch_get_dtype(handle, &dtype));
        sizes = size, strides = stride;
    }
    Tensor(Tensor&& other) noexcept { *this = static_cast<Tensor&&>(other); }
    Tensor& operator=(Tensor&& other) noexcept {
        if (this == &other) return *this;
        if (handle) aoti_torch_delete_tensor_object(handle);
        std::memcpy(static_cast<void*>(this), &other, sizeof(Tensor));
        other.handle = nullptr;
        return *this;
    }
    ~Tensor() {
        if (handle) aoti_torch_delete_tensor_object(handle);
    }
    // Contiguous and not written yet.
    static Tensor empty(std::initializer_list<int64_t> shape, int32_t dtype) {
        return empty(shape.begin(), static_cast<int64_t>(shape.size()), dtype);
    }
    // Like another one, with that last size.
    static Tensor like(const Tensor& x, int64_t last) {
        std::vector<int64_t> shape(x.sizes, x.sizes + x.dims);
        shape.back() = last;
        return empty(shape.data(), x.dims, x.dtype);
    }
    static Tensor empty(const int64_t* shape, int64_t count, int32_t dtype) {
        std::vector<int64_t> strides(static_cast<size_t>(count));
        int64_t step = 1, d = count;
        while (d-- > 0) strides[size_t(d)] = step, step *= shape[d] > 1 ? shape[d] : 1;
        AtenTensorHandle made;
        check(aoti_torch_empty_strided(count, shape, strides.data(), dtype,
                                       aoti_torch_device_type_cpu(), 0, &made));
        Tensor result(made, true);
        result.expect_huge_pages();
        return result;
    }
    // For new memory from the system, mapping it in small pages takes longer than writing it.
    void expect_huge_pages() const {
#ifdef MADV_HUGEPAGE  // Linux's
        const uintptr_t page = uintptr_t(1) << 21, at = reinterpret_cast<uintptr_t>(data);
        const uintptr_t begin = (at + page - 1) & ~(page - 1);
        const uintptr_t end = (at + uintptr_t(bytes())) & ~(page - 1);
        if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
    }
    // Whether there is a tensor: one without an element has no memory.
    explicit operator bool() const { return handle != nullptr; }
    // 0 where there is no such dimension.
    int64_t size(int64_t d) const { return d < dims ? sizes[d] : 0; }
    // The size of a contiguous tensor.
    int64_t bytes() const {
        int64_t count = dims ? strides[0] * sizes[0] : 1;
        return count * bytes_each();
    }
    void clear() const {
        if (bytes()) std::memset(data, 0, size_t(bytes()));
    }
    int64_t bytes_each() const {
        if (dtype == aoti_torch_dtype_uint8() || dtype == aoti_torch_dtype_bool()) return 1;
        if (dtype == aoti_torch_dtype_int64()) return 8;
        return type() == Type::F64 ? 8 : type() == Type::F32 ? 4 : 2;
    }
    Type type() const {
        if (dtype == aoti_torch_dtype_float32()) return Type::F32;
        if (dtype == aoti_torch_dtype_float64()) return Type::F64;
        if (dtype == aoti_torch_dtype_bfloat16()) return Type::BF16;
        if (dtype == aoti_torch_dtype_float16()) return Type::F16;
        throw std::runtime_error("latte: a floating-point tensor was expected");
    }
    template <class T>
    T* at() const {
        return reinterpret_cast<T*>(data);
    }
};

// What sums are kept in: fp64 for fp64, else fp32.
inline int32_t wide(const Tensor& x) {
    return x.type() == Type::F64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

// The arguments of a kernel are taken from the stack one after the other. Its results are then put
// on the stack. A tensor that is not taken is never freed. Therefore all arguments are taken before
// any of them is checked.
class Stack {
public:
    explicit Stack(StableIValue* arguments) : stack(arguments) {}
    Tensor tensor(bool written = false) {
        return Tensor(read<AtenTensorHandle>(stack[next++]), written);
    }
    Tensor maybe_tensor(bool written = false) {
        auto* boxed = read<StableIValue*>(stack[next++]);
        if (!boxed) return Tensor();
        auto* handle = read<AtenTensorHandle>(*boxed);
        delete boxed;
        return Tensor(handle, written);
    }
    // Of tensors that may be absent: a box of each, or 0.
    std::vector<StableIValue> maybe_tensors() {
        auto* list = read<StableListHandle>(stack[next++]);
        size_t count;
        check(torch_list_size(list, &count));
        std::vector<StableIValue> found(count);
        for (size_t i = 0; i < count; ++i) check(torch_list_get_item(list, i, &found[i]));
        check(torch_delete_list(list));
        return found;
    }
    int64_t integer() { return read<int64_t>(stack[next++]); }
    double number() { return read<double>(stack[next++]); }
    bool flag() { return read<bool>(stack[next++]); }
    template <class... Results>
    void give(Results&... results) {
        int place = 0;
        ((stack[place++] = reinterpret_cast<uintptr_t>(results.handle), results.handle = nullptr),
         ...);
    }

private:
    template <class T>
    static T read(StableIValue value) {
        T result;
        std::memcpy(&result, &value, sizeof(T));
        return result;
    }
    StableIValue* stack;
    int next = 0;
};

inline int64_t thread_count() {
    uint32_t count;
    check(torch_get_num_threads(&count));
    return count;
}

// Calls work(begin, end) for parts of 0 ... count, each of at least `grain`, on PyTorch's threads.
template <class Work>
void parallel(int64_t count, int64_t grain, const Work& work) {
    auto call = [](int64_t begin, int64_t end, void* context) {
        (*static_cast<const Work*>(context))(begin, end);
    };
    check(torch_parallel_for(0, count, grain, call, const_cast<Work*>(&work)));
}

// Tasks 0 ... count - 1, which threads take one after the other.
class Tasks {
public:
    explicit Tasks(int64_t number) : count(number) {}
    // The first that no thread has taken yet, or -1.
    int64_t next() {
        const int64_t task = taken.fetch_add(1, std::memory_order_relaxed);
        return task < count ? task : -1;
    }

private:
    const int64_t count;
    std::atomic<int64_t> taken{0};
};

// Calls work(tasks) on each of PyTorch's threads, for tasks that take different times: the longest
// should be the first.
template <class Work>
void parallel_tasks(int64_t count, const Work& work) {
    Tasks tasks(count);
    parallel(std::min(count, thread_count()), 1, [&](int64_t, int64_t) { work(tasks); });
}

// Registers kernels of the ops latte::NAME, whose schemas are defined in Python.
struct Register {
    using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);
    Register(const char* name, Kernel kernel) {
        static TorchLibraryHandle library = [] {
            TorchLibraryHandle made;
            check(aoti_torch_library_init_impl("latte", "CPU", __FILE__, __LINE__, &made));
            return made;
        }();
        const uint64_t version = (2ULL << 56) | (10ULL << 48);
        check(torch_library_impl(library, name, kernel, version));
    }
};

}  // namespace latte

// Compiles the file LATTE_FILE once per instruction set, each time in a namespace of its own, with
// the vectors of simd.h in that set's width. The compiler's flags stay those of the baseline. The
// first call of such a function decides, once, which set runs.
//
// A file that defines LATTE_FOR_PAIRS is compiled once more, for AVX512-BF16, with LATTE_PAIRS = 1:
// products of pairs of bf16. Other files would gain nothing by that set, and run AVX-512. In the
// same way a file that defines LATTE_FOR_BYTES has LATTE_BYTES = 1 for AVX512-VNNI: products of
// bytes.
//
// LATTE_CHOOSE(f) is the function f of the best namespace that this processor runs.
// ATEN_CPU_CAPABILITY=default|avx2|avx512 limits the choice to that set and lesser ones, as it does
// in PyTorch; with avx512 there is no AVX512-BF16.
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "torch_abi.h"

#define LATTE_INLINE static inline __attribute__((always_inline))
#define LATTE_PAIRS 0
#define LATTE_BYTES 0
// Older compilers do not know AVX512-BF16. Then AVX-512 is the best set for every file.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define LATTE_KNOWS_PAIRS
#else
#undef LATTE_FOR_PAIRS
#endif

// Functions between these two are compiled for more instruction sets than the baseline.
#define LATTE_PRAGMA(words) _Pragma(#words)
#if defined(__clang__)
#define LATTE_BEGIN(sets) \
    LATTE_PRAGMA(clang attribute push(__attribute__((target(sets))), apply_to = function))
#define LATTE_END LATTE_PRAGMA(clang attribute pop)
#define LATTE_512(sets) sets "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
#else
#define LATTE_BEGIN(sets) LATTE_PRAGMA(GCC push_options) LATTE_PRAGMA(GCC target(sets))
#define LATTE_END LATTE_PRAGMA(GCC pop_options)
#define LATTE_512(sets) sets "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512"
#endif

#if defined(__x86_64__)
LATTE_BEGIN("avx2,fma,f16c")
#define LATTE_WIDTH 32
namespace latte::avx2 {
#include "simd.h"
#include LATTE_FILE
}  // namespace latte::avx2
#undef LATTE_WIDTH
LATTE_END
LATTE_BEGIN(LATTE_512(""))
#define LATTE_WIDTH 64
namespace latte::avx512 {
#include "simd.h"
#include LATTE_FILE
}  // namespace latte::avx512
LATTE_END
#ifdef LATTE_FOR_PAIRS
#undef LATTE_PAIRS
#define LATTE_PAIRS 1
LATTE_BEGIN(LATTE_512("avx512bf16,"))
namespace latte::avx512_bf16 {
#include "simd.h"
#include LATTE_FILE
}  // namespace latte::avx512_bf16
LATTE_END
#undef LATTE_PAIRS
#define LATTE_PAIRS 0
#endif
#ifdef LATTE_FOR_BYTES
#undef LATTE_BYTES
#define LATTE_BYTES 1
LATTE_BEGIN(LATTE_512("avx512vnni,"))
namespace latte::avx512_vnni {
#include "simd.h"
#include LATTE_FILE
}  // namespace latte::avx512_vnni
LATTE_END
#undef LATTE_BYTES
#define LATTE_BYTES 0
#endif
#undef LATTE_WIDTH
#endif

#define LATTE_WIDTH 16
namespace latte::baseline {
#include "simd.h"
#include LATTE_FILE
}  // namespace latte::baseline
#undef LATTE_WIDTH

namespace latte {

enum class Isa { baseline, avx2, avx512, avx512_bf16 };

inline Isa isa() {
    static const Isa chosen = [] {
#if defined(__x86_64__)
        const char* most = std::getenv("ATEN_CPU_CAPABILITY");
        if (most && !std::strcmp(most, "default")) return Isa::baseline;
        if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::baseline;
        if (most && !std::strcmp(most, "avx2")) return Isa::avx2;
        if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
            !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
            return Isa::avx2;
#ifdef LATTE_KNOWS_PAIRS
        const bool limited = most && !std::strcmp(most, "avx512");
        if (!limited && __builtin_cpu_supports("avx512bf16")) return Isa::avx512_bf16;
#endif
        return Isa::avx512;
#else
        return Isa::baseline;
#endif
    }();
    return chosen;
}

#if defined(__x86_64__)
// Whether a processor with AVX-512 has AVX512-VNNI.
inline bool has_bytes() {
    static const bool has = __builtin_cpu_supports("avx512vnni");
    return has;
}
#endif

}  // namespace latte

#if defined(__x86_64__)
#ifdef LATTE_FOR_PAIRS
#define LATTE_AVX512(f) \
    (::latte::isa() == ::latte::Isa::avx512_bf16 ? ::latte::avx512_bf16::f : ::latte::avx512::f)
#elif defined(LATTE_FOR_BYTES)
#define LATTE_AVX512(f) (::latte::has_bytes() ? ::latte::avx512_vnni::f : ::latte::avx512::f)
#else
#define LATTE_AVX512(f) ::latte::avx512::f
#endif
#define LATTE_CHOOSE(f)                                        \
    (::latte::isa() >= ::latte::Isa::avx512 ? LATTE_AVX512(f)  \
     : ::latte::isa() == ::latte::Isa::avx2 ? ::latte::avx2::f \
                                            : ::latte::baseline::f)
#else
#define LATTE_CHOOSE(f) ::latte::baseline::f
#endif

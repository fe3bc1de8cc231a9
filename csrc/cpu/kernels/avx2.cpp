// The CPU kernels for x86 processors with AVX2, FMA and F16C.
#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "dtype.h"

#define APEX_MP_LEVEL 1

// Everything included above is compiled for any processor; only what follows is for this level. So
// are the formulas, which otherwise could not be inlined here; they have internal linkage.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "cpu/kernels/convert.h"
#include "cpu/kernels/kernels.h"
#include "math/axpby.h"
#include "math/check.h"
#include "math/codes.h"
#include "math/exponent.h"
#include "math/rounding.h"
#include "math/rules.h"
#include "math/split.h"
#include "math/unscale.h"

namespace apex_mp::cpu::avx2 {
namespace {
#include "cpu/kernels/impl.h"
}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = table("avx2", math::AllRules{});

}  // namespace apex_mp::cpu::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // x86-64 with a GNU-like compiler

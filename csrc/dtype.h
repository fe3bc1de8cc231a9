// The element types that the kernels of all backends know: plain C++, no torch, no CUDA.
#pragma once

#include <cstdint>

#include "math/common.h"

namespace apex_mp {

// kRemainder belongs to a 16-bit number; both together are a float, see math/split.h. kCode is a
// moment in one byte, see math/codes.h.
enum class DType : int32_t { kHalf, kBFloat16, kFloat, kDouble, kRemainder, kCode };

// Not for kCode, so that kernels without moments need not ask.
APEX_MP_MATH constexpr int64_t size_of(DType dtype) {
  return dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2;
}

inline int64_t any_size_of(DType dtype) { return dtype == DType::kCode ? 1 : size_of(dtype); }

}  // namespace apex_mp

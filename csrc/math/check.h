// The test for inf and NaN, and the term in the sum of squares, of one gradient.
#pragma once

#include <cstdint>
#include <cstring>

#include "math/common.h"

namespace apex_mp::math {

// The test looks at the exponent bits: a comparison could be folded away by a compiler that may
// assume finite numbers. The result is an int, not a bool: compilers vectorise an OR into an int.
APEX_MP_MATH int32_t not_finite(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return (bits & 0x7f800000u) == 0x7f800000u;
}

APEX_MP_MATH int32_t not_finite(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return (bits & 0x7ff0000000000000ull) == 0x7ff0000000000000ull;
}

template <typename opmath_t>
APEX_MP_MATH void check(opmath_t grad, opmath_t& sum_sq, int32_t& found_inf) {
  sum_sq += grad * grad;
  found_inf |= not_finite(grad);
}

}  // namespace apex_mp::math

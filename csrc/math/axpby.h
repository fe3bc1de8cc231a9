// out = a * x + b * y, with the finite test on x, on y, or on both.
#pragma once

#include "math/check.h"

namespace apex_mp::math {

template <typename opmath_t>
struct Axpby {
  opmath_t a;
  opmath_t b;
  int32_t check_x;  // 1: a non-finite x counts, 0: it does not
  int32_t check_y;
};

template <typename opmath_t>
APEX_MP_MATH opmath_t axpby(opmath_t x, opmath_t y, const Axpby<opmath_t>& factors,
                            int32_t& found_inf) {
  found_inf |= (not_finite(x) & factors.check_x) | (not_finite(y) & factors.check_y);
  return factors.a * x + factors.b * y;
}

}  // namespace apex_mp::math

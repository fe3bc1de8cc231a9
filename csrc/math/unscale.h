// Scaled gradient -> gradient.
#pragma once

#include "math/check.h"

namespace apex_mp::math {

// An infinite or NaN gradient is passed on, so that it is in the result, too.
template <typename opmath_t>
APEX_MP_MATH opmath_t unscale(opmath_t grad, opmath_t inv_scale, int32_t& found_inf) {
  found_inf |= not_finite(grad);
  return grad * inv_scale;
}

}  // namespace apex_mp::math

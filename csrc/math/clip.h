// Gradient norms and clipping by them, as FusedAdam's max_grad_norm does.
#pragma once

#include <cmath>

#include "math/common.h"

namespace apex_mp::math {

// Sums of squares of scaled gradients, and of others that are not scaled. Both are sums in double,
// so neither they nor their roots overflow.
struct SumSq {
  double scaled;
  double plain;
};

// l2 norm of all those gradients, unscaled. `scale` may be large: it is not squared.
APEX_MP_MATH double unscaled_norm(const SumSq& sum_sq, double scale) {
  return std::hypot(std::sqrt(sum_sq.scaled) / scale, std::sqrt(sum_sq.plain));
}

// By how much gradients of this norm exceed max_norm; below 1 they do not. The small number is that
// of apex and of torch.nn.utils.clip_grad_norm_.
APEX_MP_MATH double excess_norm(double norm, double max_norm) { return (norm + 1e-6) / max_norm; }

// Returns the divisor that clips gradients of this norm to max_norm; 0 does not clip.
APEX_MP_MATH double clip_divisor(double norm, double max_norm) {
  if (!(max_norm > 0.0)) return 1.0;
  const double excess = excess_norm(norm, max_norm);
  return excess > 1.0 || excess != excess ? excess : 1.0;
}

}  // namespace apex_mp::math

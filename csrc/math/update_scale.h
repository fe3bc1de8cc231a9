// The rule of a dynamic loss scale, equal to DynamicLossScale.update in loss_scale.py.
#pragma once

#include "math/common.h"

namespace apex_mp::math {

// The constants of a loss scale. loss_scale.py checks the ranges: growth_factor is 1 or more,
// backoff_factor between 0 and 1, counts are 1 or more, and min_scale is 2**-126 or more and not
// above max_scale, which may be inf.
struct LossScaleRule {
  double growth_factor;
  double backoff_factor;
  double min_scale;
  double max_scale;
  int growth_interval;  // good steps in a row before the scale grows
  int hysteresis;       // overflows until the scale backs off
};

// The state, which each step updates; Python's tensors have it in this order.
struct LossScaleState {
  float scale;
  int good_steps;  // since the last overflow or growth
  int overflows;   // since the last growth, at which the scale stayed
};

// Returns the state of the next step. Callers skip this step if `found_inf`.
// Products are doubles rounded to float once, as in Python and GradScaler: equal to the bit. A
// bound only stops the scale.
APEX_MP_MATH LossScaleState update_scale(LossScaleState state, bool found_inf,
                                         const LossScaleRule& rule) {
  constexpr double kFloatMax = 3.4028234663852886e38;  // Above it, the cast would be undefined.
  const double scale = state.scale;

  if (found_inf) {
    state.good_steps = 0;
    // Not overflows + 1 >= hysteresis: a count that was read from a file must not overflow.
    if (state.overflows < rule.hysteresis - 1) {
      state.overflows += 1;
      return state;
    }
    const double product = scale * rule.backoff_factor;
    const double smaller = product > rule.min_scale ? product : rule.min_scale;
    if (smaller < scale) state.scale = static_cast<float>(smaller);
    return state;
  }

  if (state.good_steps < rule.growth_interval - 1) {
    state.good_steps += 1;  // A good step alone leaves overflows as they are.
    return state;
  }
  const double product = scale * rule.growth_factor;
  const double larger = product < rule.max_scale ? product : rule.max_scale;
  if (scale < larger && larger <= kFloatMax) state.scale = static_cast<float>(larger);
  state.good_steps = 0;
  state.overflows = 0;
  return state;
}

}  // namespace apex_mp::math

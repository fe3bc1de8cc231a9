// The numbers between the two passes of a step: from sums of squares to the factors that gradients
// are multiplied by. One set of formulas for the CPU and for the last block of a CUDA pass.
#pragma once

#include "math/clip.h"

namespace apex_mp::math {

// How one parameter group clips.
struct ClipRule {
  double max_norm;  // 0: do not clip
  bool maximize;
  bool has_norm;  // the caller has given the norm of the group's gradients as they lie
  double norm;
};

// What a step makes of the gradients of one group.
struct GroupOutcome {
  double norm;           // of the group's own gradients, unscaled
  double scaled_factor;  // what gradients that the loss scale has scaled are multiplied by
  double plain_factor;   // what the others are multiplied by
};

// `clipped` is what max_norm bounds the norm of: the group's own gradients, or those of all groups.
// A norm that was given comes before either.
APEX_MP_MATH GroupOutcome group_outcome(const ClipRule& rule, const SumSq& own,
                                        const SumSq& clipped, double scale) {
  const double norm = rule.has_norm ? rule.norm / scale : unscaled_norm(clipped, scale);
  const double clip = clip_divisor(norm, rule.max_norm);
  const double sign = rule.maximize ? -1.0 : 1.0;
  return {unscaled_norm(own, scale), sign / (scale * clip), sign / clip};
}

}  // namespace apex_mp::math

// The numbers between the two passes of a step: from sums of squares to the factors of gradients.
// The same formulas for the CPU and for the last block of a CUDA pass.
#pragma once

#include "math/clip.h"

namespace apex_mp::math {

// The divisor of scaled gradients that also clips them, of this norm before clipping and unscaled,
// to `clip_to`; negative: they are not clipped. Rounded as the product of two float tensors.
APEX_MP_MATH double clipped_scale(double scale, double norm, double clip_to) {
  if (!(clip_to >= 0.0)) return scale;
  const double excess = excess_norm(norm, clip_to);
  return excess > 1.0 ? double{static_cast<float>(excess) * static_cast<float>(scale)} : scale;
}

// How one parameter group clips.
struct ClipRule {
  double max_norm;  // 0: do not clip
  bool maximize;
  bool has_norm;  // the caller has given the norm of the group's gradients as they lie
  double norm;
};

// How a step treats the gradients of one group.
struct GroupOutcome {
  double norm;           // of the group's own gradients, unscaled, before clipping
  double scaled_factor;  // what gradients that the loss scale has scaled are multiplied by
  double plain_factor;   // what the others are multiplied by
};

// `clipped` are the sums of the gradients whose norm max_norm bounds: the group's own, or those of
// all groups. A norm that was given is used instead. `scale` is what clipped_scale() has made of
// the loss scale.
APEX_MP_MATH GroupOutcome group_outcome(const ClipRule& rule, const SumSq& own,
                                        const SumSq& clipped, double loss_scale, double scale) {
  const double norm = rule.has_norm ? rule.norm / scale : unscaled_norm(clipped, scale);
  const double clip = clip_divisor(norm, rule.max_norm);
  const double sign = rule.maximize ? -1.0 : 1.0;
  return {unscaled_norm(own, loss_scale), sign / (scale * clip), sign / clip};
}

}  // namespace apex_mp::math

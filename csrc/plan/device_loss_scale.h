// A dynamic loss scale on a device, as Python gives it to a step. For the plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "plan/task.h"

namespace apex_mp::step {

class DeviceLossScale {
 public:
  // The state is shared with the caller. Throws a sentence for a tensor that is none, and for a
  // rule out of range.
  DeviceLossScale(const at::Tensor& state, at::ArrayRef<double> rule);

  // The memory of the loss scale for a step of `caller`. Throws a sentence if it is not on
  // `device`.
  LossScale memory(const std::string& caller, const at::Device& device) const;

 private:
  at::Tensor state_;
  math::LossScaleRule rule_;
};

}  // namespace apex_mp::step

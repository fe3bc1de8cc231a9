// A dynamic loss scale on a device, as Python gives it to a step. For the plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "plan/task.h"

namespace apex_mp::step {

class DeviceLossScale {
 public:
  // The tensors have one number each: float32, int32 and int32, on one device. They are shared with
  // the caller, who has checked the rule. Throws a sentence for other tensors.
  DeviceLossScale(const at::Tensor& scale, const at::Tensor& good_steps,
                  const at::Tensor& overflows, const math::LossScaleRule& rule);

  // The memory of the loss scale for a step of `caller`. Throws a sentence if it is not on
  // `device`.
  LossScale memory(const std::string& caller, const at::Device& device) const;

 private:
  at::Tensor scale_;
  at::Tensor good_steps_;
  at::Tensor overflows_;
  math::LossScaleRule rule_;
};

}  // namespace apex_mp::step

// A dynamic loss scale that lives on a device, as Python hands it to a step. For the plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "step/task.h"

namespace apex_mp::step {

class DeviceLossScale {
 public:
  // One number each: float32, int32 and int32, on one device; they are shared with the caller, who
  // has checked the rule. Throws a sentence for other tensors.
  DeviceLossScale(const at::Tensor& scale, const at::Tensor& good_steps,
                  const at::Tensor& overflows, const math::LossScaleRule& rule);

  // Where a step of `caller` on `device` finds it. Throws a sentence if it is on another one.
  LossScale memory(const std::string& caller, const at::Device& device) const;

 private:
  at::Tensor scale_;
  at::Tensor good_steps_;
  at::Tensor overflows_;
  math::LossScaleRule rule_;
};

}  // namespace apex_mp::step

// Checks the tensors of a loss scale, and finds their memory.
#include "plan/device_loss_scale.h"

#include "checks.h"

namespace apex_mp::step {

DeviceLossScale::DeviceLossScale(const at::Tensor& scale, const at::Tensor& good_steps,
                                 const at::Tensor& overflows, const math::LossScaleRule& rule)
    : scale_(scale), good_steps_(good_steps), overflows_(overflows), rule_(rule) {
  constexpr const char* kCaller = "DeviceLossScale";
  const at::Device device = scale.device();
  check_one_element({kCaller, "scale"}, scale, device, {at::kFloat});
  check_one_element({kCaller, "good_steps"}, good_steps, device, {at::kInt});
  check_one_element({kCaller, "overflows"}, overflows, device, {at::kInt});
}

LossScale DeviceLossScale::memory(const std::string& caller, const at::Device& device) const {
  TORCH_CHECK(scale_.device() == device, caller, ": the loss scale is on ", scale_.device(),
              ", the parameters are on ", device, "; they must be on one device");
  return {scale_.mutable_data_ptr<float>(), good_steps_.mutable_data_ptr<int>(),
          overflows_.mutable_data_ptr<int>(), rule_};
}

}  // namespace apex_mp::step

// Checks the state of a loss scale, and finds its memory.
#include "plan/device_loss_scale.h"

#include "op_checks.h"

namespace apex_mp::step {

DeviceLossScale::DeviceLossScale(const at::Tensor& state, at::ArrayRef<double> rule)
    : state_(state), rule_(checked_rule("DeviceLossScale", rule)) {
  check_loss_scale("DeviceLossScale", state, state.device());
}

LossScale DeviceLossScale::memory(const std::string& caller, const at::Device& device) const {
  TORCH_CHECK(state_.device() == device, caller, ": the loss scale is on ", state_.device(),
              ", the parameters are on ", device, "; they must be on one device");
  return {static_cast<math::LossScaleState*>(state_.mutable_data_ptr()), rule_};
}

}  // namespace apex_mp::step

// update_scale_ on the CPU: one step of the dynamic loss scale.
#include "math/update_scale.h"

#include <torch/library.h>

#include "op_checks.h"

namespace apex_mp::cpu {
namespace {

void update_scale_(const at::Tensor& state, at::ArrayRef<double> rule,
                   const at::Tensor& found_inf) {
  check_update_scale(state, found_inf);
  const math::LossScaleRule checked = checked_rule("update_scale_", rule);
  auto* now = static_cast<math::LossScaleState*>(state.mutable_data_ptr());
  *now = math::update_scale(*now, *found_inf.const_data_ptr<float>() != 0.0f, checked);
  bump_version(state);
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, CPU, m) { m.impl("update_scale_", &update_scale_); }

}  // namespace apex_mp::cpu

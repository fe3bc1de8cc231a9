// update_scale_ on the CPU: one step of the dynamic loss scale.
#include "math/update_scale.h"

#include <torch/library.h>

#include "op_checks.h"

namespace apex_mp::cpu {
namespace {

void update_scale_(const at::Tensor& scale, const at::Tensor& good_steps,
                   const at::Tensor& overflows, const at::Tensor& found_inf, double growth_factor,
                   double backoff_factor, int64_t growth_interval, double min_scale,
                   double max_scale, int64_t hysteresis) {
  check_update_scale(scale, good_steps, overflows, found_inf, growth_interval, hysteresis);
  const math::LossScaleRule rule = {growth_factor,
                                    backoff_factor,
                                    min_scale,
                                    max_scale,
                                    static_cast<int>(growth_interval),
                                    static_cast<int>(hysteresis)};
  check_rule(rule);
  const math::LossScaleState before = {*scale.const_data_ptr<float>(),
                                       *good_steps.const_data_ptr<int>(),
                                       *overflows.const_data_ptr<int>()};
  const bool found = *found_inf.const_data_ptr<float>() != 0.0f;
  const math::LossScaleState after = math::update_scale(before, found, rule);
  *scale.mutable_data_ptr<float>() = after.scale;
  *good_steps.mutable_data_ptr<int>() = after.good_steps;
  *overflows.mutable_data_ptr<int>() = after.overflows;
  bump_version(scale);
  bump_version(good_steps);
  bump_version(overflows);
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, CPU, m) { m.impl("update_scale_", &update_scale_); }

}  // namespace apex_mp::cpu

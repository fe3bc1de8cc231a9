// Whether a state fits its parameter.
#include "step/adam_state.h"

namespace apex_mp::step {

bool lies_otherwise(const AdamState& state, const at::Tensor& param) {
  const auto otherwise = [&](PyObject* object) {
    return object != nullptr && !lie_alike(tensor_of(object), param);
  };
  return otherwise(state.exp_avg) || otherwise(state.exp_avg_sq) || otherwise(state.master_param);
}

void check_state(const AdamState& state, const at::Tensor& param, const Place& place) {
  const at::ScalarType moments = param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto check = [&](const char* name, PyObject* object, at::ScalarType dtype) {
    if (object == nullptr) return;
    check_peer_but_order(tensor_of(object), place.in(name), param, place);
    check_dtype(tensor_of(object), place.in(name), dtype);
  };
  check("exp_avg", state.exp_avg, moments);
  check("exp_avg_sq", state.exp_avg_sq, moments);
  check("master_param", state.master_param, at::kFloat);
  if (state.step != nullptr) {
    check_count(tensor_of(state.step), place.in("step"), param.device());
  }
}

}  // namespace apex_mp::step

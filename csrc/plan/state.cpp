// Whether a state fits its parameter.
#include "plan/state.h"

#include <algorithm>

namespace apex_mp::step {

State read_state(PyObject* dictionary, PyObject* master, const StateNames& names) {
  State state;
  if (master != nullptr && is_tensor(master)) state.master = local_part(master);
  if (dictionary == nullptr || !PyDict_Check(dictionary)) return state;
  const auto look_up = [dictionary](PyObject* name) {
    PyObject* found = name == nullptr ? nullptr : entry(dictionary, name);
    return found != nullptr && is_tensor(found) ? local_part(found) : nullptr;
  };
  for (int i = 0; i < math::kMaxTensors; ++i) {
    state.tensors[i] = look_up(names.tensors[i]);
    state.exponents[i] = look_up(names.exponents[i]);
  }
  for (int i = 0; i < math::kMaxNumbers; ++i) state.numbers[i] = look_up(names.numbers[i]);
  return state;
}

bool lies_otherwise(const State& state, const RequiredState& required, const at::Tensor& param) {
  const auto otherwise = [&](PyObject* object) {
    return object != nullptr && !lie_alike(tensor_of(object), param);
  };
  return std::any_of(state.tensors, state.tensors + required.tensors, otherwise) ||
         otherwise(state.master);
}

void check_state(const State& state, const StateNames& names, const RequiredState& required,
                 const at::Tensor& param, const Place& place) {
  const at::ScalarType wide = param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto check = [&](const char* name, PyObject* object, at::ScalarType dtype) {
    if (object == nullptr) return;
    const Place here = place.in(name);
    check_peer_but_order(tensor_of(object), here, param, place);
    check_dtype(tensor_of(object), here, dtype);
  };
  for (int i = 0; i < required.tensors; ++i) {
    PyObject* object = state.tensors[i];
    const char* name = PyUnicode_AsUTF8(names.tensors[i]);
    if (object != nullptr && tensor_of(object).scalar_type() == at::kChar) {
      const Place here = place.in(name);
      check_integers(tensor_of(object), here, param, place);
      TORCH_CHECK_VALUE(state.exponents[i] != nullptr, place.caller, ": ", name, '[', place.group,
                        "][", place.index, "] has codes of one byte, and the state has no '",
                        PyUnicode_AsUTF8(names.exponents[i]), "' beside it; load the state anew");
      const Place exponents = place.in(PyUnicode_AsUTF8(names.exponents[i]));
      check_exponents(tensor_of(state.exponents[i]), exponents, param);
      continue;
    }
    const bool is_wanted = object != nullptr && required.takes(tensor_of(object).scalar_type());
    check(name, object, is_wanted ? tensor_of(object).scalar_type() : wide);
  }
  if (state.master != nullptr && tensor_of(state.master).scalar_type() == at::kShort) {
    check_integers(tensor_of(state.master), place.in("masters"), param, place);
  } else {
    check("masters", state.master, at::kFloat);
  }
  for (int i = 0; i < math::kMaxNumbers; ++i) {
    if (state.numbers[i] == nullptr) continue;
    check_number_of_state(tensor_of(state.numbers[i]), place.in(PyUnicode_AsUTF8(names.numbers[i])),
                          param.device());
  }
}

}  // namespace apex_mp::step

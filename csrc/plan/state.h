// The present state of a parameter, optimizer.state[param], and its master. For the plan.
#pragma once

#include "math/codes.h"
#include "math/rules.h"
#include "plan/hyperparameters.h"
#include "plan/python_tensors.h"
#include "plan/row_checks.h"

namespace apex_mp::step {

// The names of a state's tensors and numbers, in the order of the rule (math/rule.h).
struct StateNames {
  PyObject* tensors[math::kMaxTensors] = {};
  PyObject* exponents[math::kMaxTensors] = {};  // beside tensors of one byte
  PyObject* numbers[math::kMaxNumbers] = {};
};

// The entries that a step requires.
struct RequiredState {
  int tensors;
  int numbers;
  at::ScalarType dtype;  // of tensors
  Masters masters;       // kNone if the parameter is not of low precision
  bool takes_floats;     // in place of codes: the parameter is small

  bool takes(at::ScalarType moments) const {
    return moments == dtype || (takes_floats && moments == at::kFloat);
  }

  RequiredState of(const at::Tensor& param) const {
    const bool is_low = param.scalar_type() == at::kHalf || param.scalar_type() == at::kBFloat16;
    const bool is_double = param.scalar_type() == at::kDouble;
    const bool is_small = dtype == at::kChar && param.numel() < math::kLeastCoded;
    return {tensors, numbers, is_double ? at::kDouble : dtype, is_low ? masters : Masters::kNone,
            is_small};
  }
};

// The entries of a state, borrowed; nullptr: missing, or not a tensor.
struct State {
  PyObject* tensors[math::kMaxTensors] = {};
  PyObject* exponents[math::kMaxTensors] = {};
  PyObject* numbers[math::kMaxNumbers] = {};
  PyObject* master = nullptr;

  // Whether there is a master in this form, or none if there should be none.
  bool has(Masters masters) const {
    if (masters == Masters::kNone) return master == nullptr;
    const at::ScalarType dtype = masters == Masters::kFloat ? at::kFloat : at::kShort;
    return master != nullptr && tensor_of(master).scalar_type() == dtype;
  }

  // Whether all required entries exist in the required dtypes.
  bool is_complete(const RequiredState& required) const {
    for (int i = 0; i < required.tensors; ++i) {
      if (tensors[i] == nullptr) return false;
      const at::ScalarType dtype = tensor_of(tensors[i]).scalar_type();
      if (!required.takes(dtype) || dtype != tensor_of(tensors[0]).scalar_type()) return false;
      if (dtype == at::kChar && exponents[i] == nullptr) return false;
    }
    for (int i = 0; i < required.numbers; ++i) {
      if (numbers[i] == nullptr) return false;
    }
    return has(required.masters);
  }
};

// Reads the entries by the addresses of their names. Does not call Python; the dictionary must not
// be written meanwhile.
inline State read_usual_state(PyObject* dictionary, PyObject* master, const StateNames& names) {
  State state;
  if (master != nullptr && is_tensor(master)) state.master = master;
  if (dictionary == nullptr || !PyDict_Check(dictionary)) return state;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(dictionary, &position, &key, &value);) {
    if (!is_tensor(value)) continue;
    for (int i = 0; i < math::kMaxTensors; ++i) {
      if (key == names.tensors[i]) state.tensors[i] = value;
      if (key == names.exponents[i]) state.exponents[i] = value;
    }
    for (int i = 0; i < math::kMaxNumbers; ++i) {
      if (key == names.numbers[i]) state.numbers[i] = value;
    }
  }
  return state;
}

// Reads the entries by their names: in a loaded state names are other objects.
State read_state(PyObject* dictionary, PyObject* master, const StateNames& names);

// Whether a tensor of the state has another memory order than the parameter, for example because
// the parameter was made channels_last later.
bool lies_otherwise(const State& state, const RequiredState& required, const at::Tensor& param);

// Throws a sentence unless the existing required entries fit the parameter. A wrong memory order is
// not an error, because the caller can change it.
void check_state(const State& state, const StateNames& names, const RequiredState& required,
                 const at::Tensor& param, const Place& place);

}  // namespace apex_mp::step

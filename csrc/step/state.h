// What an optimizer keeps of a parameter: optimizer.state[param] as it is now. For the plan.
#pragma once

#include "math/rules.h"
#include "step/hyperparameters.h"
#include "step/python_tensors.h"
#include "step/row_checks.h"

namespace apex_mp::step {

// By which the state has its tensors and numbers, in the order of the rule (math/rule.h).
struct StateNames {
  PyObject* tensors[math::kMaxTensors] = {};
  PyObject* numbers[math::kMaxNumbers] = {};
  PyObject* master_param = interned("master_param");
};

// What of it a step required.
struct RequiredState {
  int tensors;
  int numbers;
  at::ScalarType dtype;  // of tensors
  Masters masters;       // kNone if the parameter is not of low precision

  RequiredState of(const at::Tensor& param) const {
    const bool is_low = param.scalar_type() == at::kHalf || param.scalar_type() == at::kBFloat16;
    const bool is_double = param.scalar_type() == at::kDouble;
    return {tensors, numbers, is_double ? at::kDouble : dtype, is_low ? masters : Masters::kNone};
  }
};

// Borrowed; nullptr: not there, or no tensor.
struct State {
  PyObject* tensors[math::kMaxTensors] = {};
  PyObject* numbers[math::kMaxNumbers] = {};
  PyObject* master_param = nullptr;

  // Whether there is a master in the form that the group asks for.
  bool has(Masters masters) const {
    if (masters == Masters::kNone) return true;
    const at::ScalarType dtype = masters == Masters::kFloat ? at::kFloat : at::kShort;
    return master_param != nullptr && tensor_of(master_param).scalar_type() == dtype;
  }

  // Whether all is there, in the dtypes that are wanted.
  bool is_complete(const RequiredState& required) const {
    for (int i = 0; i < required.tensors; ++i) {
      if (tensors[i] == nullptr || tensor_of(tensors[i]).scalar_type() != required.dtype)
        return false;
    }
    for (int i = 0; i < required.numbers; ++i) {
      if (numbers[i] == nullptr) return false;
    }
    return has(required.masters);
  }
};

// Goes through the entries and compares the addresses of their names. Needs nothing of the
// interpreter but that the dictionary is not written meanwhile.
inline State read_usual_state(PyObject* dictionary, const StateNames& names) {
  State state;
  if (dictionary == nullptr || !PyDict_Check(dictionary)) return state;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(dictionary, &position, &key, &value);) {
    if (!is_tensor(value)) continue;
    for (int i = 0; i < math::kMaxTensors; ++i) {
      if (key == names.tensors[i]) state.tensors[i] = value;
    }
    for (int i = 0; i < math::kMaxNumbers; ++i) {
      if (key == names.numbers[i]) state.numbers[i] = value;
    }
    if (key == names.master_param) state.master_param = value;
  }
  return state;
}

// Looks up by their names: those of a state that was loaded are other objects.
State read_state(PyObject* dictionary, const StateNames& names);

// Whether a part of it lies in memory in another order than the parameter, which has become
// channels_last, say, since its state was made.
bool lies_otherwise(const State& state, const RequiredState& required, const at::Tensor& param);

// Throws a sentence unless what there is of what a step needs fits, but for its order in memory:
// that the caller can mend.
void check_state(const State& state, const StateNames& names, const RequiredState& required,
                 const at::Tensor& param, const Place& place);

}  // namespace apex_mp::step

// What FusedAdam keeps of a parameter: optimizer.state[param] as it is now.
#pragma once

#include "step/python_tensors.h"
#include "step/row_checks.h"

namespace apex_mp::step {

// Borrowed; nullptr: not there, or no tensor.
struct AdamState {
  PyObject* step = nullptr;
  PyObject* exp_avg = nullptr;
  PyObject* exp_avg_sq = nullptr;
  PyObject* master_param = nullptr;

  bool is_complete(bool with_master) const {
    return step != nullptr && exp_avg != nullptr && exp_avg_sq != nullptr &&
           (!with_master || master_param != nullptr);
  }
};

struct AdamStateNames {
  PyObject* step = interned("step");
  PyObject* exp_avg = interned("exp_avg");
  PyObject* exp_avg_sq = interned("exp_avg_sq");
  PyObject* master_param = interned("master_param");
};

inline const AdamStateNames& adam_state_names() {
  static const AdamStateNames names;
  return names;
}

// Goes through the entries and compares the addresses of their names. Needs nothing of the
// interpreter but that the dictionary is not written meanwhile.
inline AdamState read_usual_state(PyObject* dictionary) {
  const AdamStateNames& names = adam_state_names();
  AdamState state;
  if (dictionary == nullptr || !PyDict_Check(dictionary)) return state;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(dictionary, &position, &key, &value);) {
    if (!is_tensor(value)) continue;
    if (key == names.step) state.step = value;
    if (key == names.exp_avg) state.exp_avg = value;
    if (key == names.exp_avg_sq) state.exp_avg_sq = value;
    if (key == names.master_param) state.master_param = value;
  }
  return state;
}

// Also looks up what it has not found so: the names of a state that was loaded are other objects.
inline AdamState read_state(PyObject* dictionary, bool with_master) {
  const AdamState state = read_usual_state(dictionary);
  if (state.is_complete(with_master) || dictionary == nullptr || !PyDict_Check(dictionary)) {
    return state;
  }
  const AdamStateNames& names = adam_state_names();
  const auto look_up = [dictionary](PyObject* name) {
    PyObject* found = entry(dictionary, name);
    return found != nullptr && is_tensor(found) ? found : nullptr;
  };
  return {look_up(names.step), look_up(names.exp_avg), look_up(names.exp_avg_sq),
          look_up(names.master_param)};
}

// Whether a part of it lies in memory in another order than the parameter, which has become
// channels_last, say, since its state was made.
bool lies_otherwise(const AdamState& state, const at::Tensor& param);

// Throws a sentence unless what there is of it fits, but for its order in memory: that the caller
// can mend.
void check_state(const AdamState& state, const at::Tensor& param, const Place& place);

}  // namespace apex_mp::step

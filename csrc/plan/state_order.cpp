// Remembers the order of optimizer.state.
#include "plan/state_order.h"

#include <pybind11/pybind11.h>

#include <unordered_map>

namespace apex_mp::step {

void StateOrder::find(const std::string& caller, const std::vector<PyObject*>& params,
                      PyObject* dictionary, std::vector<PyObject*>& states) {
  const bool same_params = params == params_;
  if (!same_params) params_ = params;
  states.assign(params.size(), nullptr);
  if (same_params && find_in_known_order(dictionary, states)) return;
  learn(caller, dictionary);
  states.assign(params.size(), nullptr);
  find_in_known_order(dictionary, states);
}

bool StateOrder::find_in_known_order(PyObject* dictionary, std::vector<PyObject*>& states) const {
  if (static_cast<size_t>(PyDict_GET_SIZE(dictionary)) != keys_.size()) return false;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  for (size_t i = 0; PyDict_Next(dictionary, &position, &key, &value); ++i) {
    if (key != keys_[i]) return false;
    if (param_of_key_[i] >= 0) states[param_of_key_[i]] = value;
  }
  return true;
}

void StateOrder::learn(const std::string& caller, PyObject* dictionary) {
  std::unordered_map<PyObject*, int64_t> index_of;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (index_of.emplace(params_[i], i).second) continue;
    params_.clear();
    throw pybind11::value_error(
        caller + ": a parameter stands twice in the parameter groups; it can be stepped only once");
  }
  keys_.clear();
  param_of_key_.clear();
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(dictionary, &position, &key, &value);) {
    const auto found = index_of.find(key);
    keys_.push_back(key);
    param_of_key_.push_back(found == index_of.end() ? -1 : found->second);
  }
}

}  // namespace apex_mp::step

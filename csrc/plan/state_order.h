// Finds the state of each parameter without hashing, by the order of the last step. For the plan.
#pragma once

#include <torch/csrc/python_headers.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace apex_mp::step {

// A tensor's hash is computed in Python, which takes longer than the rest of a step for a small
// tensor. So the order of `optimizer.state` is stored once, as addresses that are not owned: they
// are compared with those of living objects before they are used.
class StateOrder {
 public:
  // Whether the dictionary has a key that is no parameter.
  bool has_others() const {
    return std::find(param_of_key_.begin(), param_of_key_.end(), -1) != param_of_key_.end();
  }

  // Fills states[i] with the value of params[i] in the dictionary, or nullptr. Borrowed.
  // Throws a sentence that begins with `caller` if a parameter stands there twice.
  void find(const std::string& caller, const std::vector<PyObject*>& params, PyObject* dictionary,
            std::vector<PyObject*>& states);

 private:
  bool find_in_known_order(PyObject* dictionary, std::vector<PyObject*>& states) const;
  void learn(const std::string& caller, PyObject* dictionary);

  std::vector<PyObject*> params_;
  std::vector<PyObject*> keys_;        // of the dictionary, in its order
  std::vector<int64_t> param_of_key_;  // -1: the key is none of the parameters
};

}  // namespace apex_mp::step

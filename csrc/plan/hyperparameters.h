// The options of a parameter group, which are read for each step, so that changes take effect. For
// the plan.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <deque>
#include <string>
#include <vector>

#include "plan/task.h"

namespace apex_mp::step {

// The form of a low-precision parameter's master in its state: none, float32, or the remainder only
// (math/split.h).
enum class Masters { kNone, kFloat, kSplit };

struct GroupOptions {
  Group group;
  Masters masters;
  at::ScalarType moments;  // of the tensors in the state, but for float64 parameters
};

// Reads numbers for a step on one device.
class NumberReader {
 public:
  // `caller` is the optimizer's name. `kept` keeps numbers alive that had to be copied to the
  // device.
  NumberReader(const std::string& caller, const at::Device& device, std::deque<at::Tensor>& kept)
      : caller_(caller), device_(device), kept_(kept) {}

  // Reads a Python number, or a tensor of one element on any device. The host reads one on a GPU
  // only for a step on the CPU.
  Number read(const char* name, PyObject* value) const;

 private:
  const std::string& caller_;
  at::Device device_;
  std::deque<at::Tensor>& kept_;
};

// Reads parameter groups for one rule.
class OptionReader {
 public:
  OptionReader(const std::string& caller, const math::RuleFacts& rule);

  // Throws KeyError, TypeError or ValueError with a sentence if an option is missing or out of
  // range.
  GroupOptions read(PyObject* param_group, const NumberReader& numbers) const;

 private:
  void read_option(const math::Option& option, PyObject* value, double* numbers) const;
  double read_number(const math::Option& option, PyObject* value) const;

  std::string caller_;
  const math::RuleFacts& rule_;
  std::vector<PyObject*> names_;  // of the rule's options
};

}  // namespace apex_mp::step

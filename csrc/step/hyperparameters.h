// The options of a parameter group, read again for each step, so that changes take effect.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <deque>

#include "step/task.h"

namespace apex_mp::step {

struct GroupOptions {
  Group group;
  bool master_weights;
};

// Numbers for a step on one device.
class NumberReader {
 public:
  // `kept` keeps numbers alive that had to be brought to the device.
  NumberReader(const at::Device& device, std::deque<at::Tensor>& kept)
      : device_(device), kept_(kept) {}

  // A Python number, or a tensor of one element on any device. The host looks at one on a GPU only
  // for a step on the CPU.
  Number read(const char* name, PyObject* value) const;

 private:
  at::Device device_;
  std::deque<at::Tensor>& kept_;
};

// Throws KeyError, TypeError or a sentence of its own if an option is missing or out of range.
GroupOptions read_options(PyObject* param_group, const NumberReader& numbers);

}  // namespace apex_mp::step

// Reads the gradients of parameters after backward, in one walk. Python calls it, through
// module.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <vector>

namespace apex_mp::step {

struct DeviceGrads {
  at::Device device;
  std::vector<int64_t> rows;  // numbers of the parameters, sorted
  std::vector<at::Tensor> grads;

  // Inserts a gradient in the order of rows.
  void insert(int64_t row, const at::Tensor& grad);

  std::vector<at::ScalarType> dtypes() const;

  // Calls the operator check_: sum_sq has a number for each parameter, also those without gradient.
  void check(const at::Tensor& found_inf, const at::Tensor& sum_sq) const;
};

struct Grads {
  std::vector<DeviceGrads> plain;  // what the operators of this build read; of DTensors the parts
  std::vector<int64_t> others;     // numbers of parameters that Python must be asked about
  bool has_parts = false;          // whether a parameter is a DTensor, with or without a gradient
};

// Reads a list of tensors; those without a gradient are left out.
Grads read_grads(PyObject* params);

}  // namespace apex_mp::step

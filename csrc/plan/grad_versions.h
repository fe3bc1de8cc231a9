// Detects gradients that are new or were written since they were recorded. For the Python classes
// that warn of edits.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <vector>

#include "plan/tensor_version.h"

namespace apex_mp::step {

// Owns no gradient: zero_grad() frees them.
class GradVersions {
 public:
  // Replaces all entries by those of the gradients of a list of parameters.
  void record(PyObject* params);

  // Whether one of these parameters has a gradient that was not recorded, or was written since.
  bool changed(PyObject* params) const;

 private:
  struct Entry {
    const PyObject* param;  // an address to compare, not owned
    bool is_part;  // the local tensor of a DTensor, which has an entry, too: a write increments one
                   // counter
    TensorVersion grad;
  };

  void add(const PyObject* param, const at::Tensor& grad, bool is_part);
  bool is_changed(const PyObject* param, const at::Tensor& grad, bool is_part,
                  size_t& likely_index) const;
  const Entry* find(const PyObject* param, bool is_part, size_t likely_index) const;

  std::vector<Entry> entries_;
};

}  // namespace apex_mp::step

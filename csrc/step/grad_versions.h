// Detects gradients that are new or were written since they were recorded. For the Python classes
// that warn of edits.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <vector>

namespace apex_mp::step {

// Owns no gradient: zero_grad() frees them. An entry owns the gradient's version counter, which
// each write increments. If nothing else owns the counter, the gradient is gone, whatever lies at
// its address now.
class GradVersions {
 public:
  // Replaces all entries by those of the gradients of a list of parameters.
  void record(PyObject* params);

  // Whether one of these parameters has a gradient that was not recorded, or was written since.
  bool changed(PyObject* params) const;

 private:
  struct Entry {
    const PyObject* param;  // this and `grad`: addresses to compare, not owned
    bool is_part;  // the local tensor of a DTensor, which has an entry, too: a write increments one
                   // counter
    const at::TensorImpl* grad;
    const void* data;
    c10::VariableVersion counter;
    int64_t version;
  };

  void add(const PyObject* param, const at::Tensor& grad, bool is_part);
  bool is_changed(const PyObject* param, const at::Tensor& grad, bool is_part,
                  size_t& likely_index) const;
  static bool fits(const Entry& entry, const at::Tensor& grad);
  const Entry* find(const PyObject* param, bool is_part, size_t likely_index) const;

  std::vector<Entry> entries_;
};

}  // namespace apex_mp::step

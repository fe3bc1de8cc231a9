// Remembers gradients as they were, so that one that came in or was written since is told apart.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <vector>

namespace apex_mp::step {

// Holds no gradient: what zero_grad() lets go is free. A mark holds the gradient's version counter
// alone. Writes count it up, and who alone holds it knows that the gradient is gone, whatever lies
// at its address by now.
class GradMarks {
 public:
  // Forgets what was marked, and marks the gradients of a list of parameters.
  void take(PyObject* params);

  // Whether one of these parameters has a gradient that is not the one marked, or was written to.
  bool differ(PyObject* params) const;

 private:
  struct Mark {
    const PyObject* param;  // this and `grad`: addresses to compare, not owned
    bool is_part;  // of a DTensor, which is marked, too: writes to one do not count in both
    const at::TensorImpl* grad;
    const void* data;
    c10::VariableVersion counter;
    int64_t version;
  };

  void take(const PyObject* param, const at::Tensor& grad, bool is_part);
  bool differs(const PyObject* param, const at::Tensor& grad, bool is_part,
               size_t& likely_index) const;
  static bool fits(const Mark& mark, const at::Tensor& grad);
  const Mark* find(const PyObject* param, bool is_part, size_t likely_index) const;

  std::vector<Mark> marks_;
};

}  // namespace apex_mp::step

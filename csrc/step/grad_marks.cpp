// Marks on gradients, and the comparison with them.
#include "step/grad_marks.h"

#include <algorithm>

#include "step/python_tensors.h"

namespace apex_mp::step {
namespace {

const void* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().data() : nullptr;
}

const at::Tensor& grad_of(PyObject* param) { return tensor_of(param).grad(); }

}  // namespace

void GradMarks::take(PyObject* params) {
  marks_.clear();
  const Py_ssize_t count = PyList_GET_SIZE(params);
  marks_.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    const at::Tensor& grad = grad_of(param);
    // An inference tensor counts no versions: nothing can be said of it later.
    if (!grad.defined() || grad.is_inference()) continue;
    const at::TensorImpl* impl = grad.unsafeGetTensorImpl();
    const c10::VariableVersion& counter = impl->version_counter();
    marks_.push_back({param, impl, memory_of(grad), counter, counter.current_version()});
  }
}

bool GradMarks::differ(PyObject* params) const {
  const Py_ssize_t count = PyList_GET_SIZE(params);
  size_t likely_index = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    const at::Tensor& grad = grad_of(param);
    if (!grad.defined()) continue;
    const Mark* mark = find(param, likely_index);
    if (mark == nullptr || !fits(*mark, grad)) return true;
    likely_index = mark - marks_.data() + 1;
  }
  return false;
}

const GradMarks::Mark* GradMarks::find(const PyObject* param, size_t likely_index) const {
  if (likely_index < marks_.size() && marks_[likely_index].param == param) {
    return &marks_[likely_index];
  }
  const auto found = std::find_if(marks_.begin(), marks_.end(),
                                  [&](const Mark& mark) { return mark.param == param; });
  return found == marks_.end() ? nullptr : &*found;
}

bool GradMarks::fits(const Mark& mark, const at::Tensor& grad) {
  return grad.unsafeGetTensorImpl() == mark.grad && memory_of(grad) == mark.data &&
         !mark.counter.unique() && mark.counter.current_version() == mark.version;
}

}  // namespace apex_mp::step

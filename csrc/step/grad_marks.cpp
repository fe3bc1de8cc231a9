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
    if (!grad.defined()) continue;
    take(param, grad, false);
    const at::Tensor& part = local_part(grad);
    if (&part != &grad) take(param, part, true);
  }
}

void GradMarks::take(const PyObject* param, const at::Tensor& grad, bool is_part) {
  // An inference tensor counts no versions: nothing can be said of it later.
  if (grad.is_inference()) return;
  const at::TensorImpl* impl = grad.unsafeGetTensorImpl();
  const c10::VariableVersion& counter = impl->version_counter();
  marks_.push_back({param, is_part, impl, memory_of(grad), counter, counter.current_version()});
}

bool GradMarks::differ(PyObject* params) const {
  const Py_ssize_t count = PyList_GET_SIZE(params);
  size_t likely_index = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    const at::Tensor& grad = grad_of(param);
    if (!grad.defined()) continue;
    if (differs(param, grad, false, likely_index)) return true;
    const at::Tensor& part = local_part(grad);
    if (&part != &grad && differs(param, part, true, likely_index)) return true;
  }
  return false;
}

bool GradMarks::differs(const PyObject* param, const at::Tensor& grad, bool is_part,
                        size_t& likely_index) const {
  const Mark* mark = find(param, is_part, likely_index);
  if (mark == nullptr || !fits(*mark, grad)) return true;
  likely_index = mark - marks_.data() + 1;
  return false;
}

const GradMarks::Mark* GradMarks::find(const PyObject* param, bool is_part,
                                       size_t likely_index) const {
  const auto is_it = [&](const Mark& mark) {
    return mark.param == param && mark.is_part == is_part;
  };
  if (likely_index < marks_.size() && is_it(marks_[likely_index])) return &marks_[likely_index];
  const auto found = std::find_if(marks_.begin(), marks_.end(), is_it);
  return found == marks_.end() ? nullptr : &*found;
}

bool GradMarks::fits(const Mark& mark, const at::Tensor& grad) {
  return grad.unsafeGetTensorImpl() == mark.grad && memory_of(grad) == mark.data &&
         !mark.counter.unique() && mark.counter.current_version() == mark.version;
}

}  // namespace apex_mp::step

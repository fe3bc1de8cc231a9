// Version counters of gradients, recorded and compared.
#include "plan/grad_versions.h"

#include <algorithm>

#include "plan/python_tensors.h"

namespace apex_mp::step {
namespace {

const at::Tensor& grad_of(PyObject* param) { return tensor_of(param).grad(); }

}  // namespace

void GradVersions::record(PyObject* params) {
  entries_.clear();
  const Py_ssize_t count = PyList_GET_SIZE(params);
  entries_.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    const at::Tensor& grad = grad_of(param);
    if (!grad.defined()) continue;
    add(param, grad, false);
    const at::Tensor& part = local_part(grad);
    if (&part != &grad) add(param, part, true);
  }
}

void GradVersions::add(const PyObject* param, const at::Tensor& grad, bool is_part) {
  // An inference tensor has no version, so a write could not be detected.
  if (grad.is_inference()) return;
  entries_.push_back({param, is_part, TensorVersion(grad)});
}

bool GradVersions::changed(PyObject* params) const {
  const Py_ssize_t count = PyList_GET_SIZE(params);
  size_t likely_index = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    const at::Tensor& grad = grad_of(param);
    if (!grad.defined()) continue;
    if (is_changed(param, grad, false, likely_index)) return true;
    const at::Tensor& part = local_part(grad);
    if (&part != &grad && is_changed(param, part, true, likely_index)) return true;
  }
  return false;
}

bool GradVersions::is_changed(const PyObject* param, const at::Tensor& grad, bool is_part,
                              size_t& likely_index) const {
  const Entry* entry = find(param, is_part, likely_index);
  if (entry == nullptr || !entry->grad.is(grad)) return true;
  likely_index = entry - entries_.data() + 1;
  return false;
}

const GradVersions::Entry* GradVersions::find(const PyObject* param, bool is_part,
                                              size_t likely_index) const {
  const auto is_it = [&](const Entry& entry) {
    return entry.param == param && entry.is_part == is_part;
  };
  if (likely_index < entries_.size() && is_it(entries_[likely_index]))
    return &entries_[likely_index];
  const auto found = std::find_if(entries_.begin(), entries_.end(), is_it);
  return found == entries_.end() ? nullptr : &*found;
}

}  // namespace apex_mp::step

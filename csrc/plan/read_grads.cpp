// Reads gradients, device by device.
#include "plan/read_grads.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <algorithm>

#include "plan/python_tensors.h"
#include "plan/row_checks.h"

namespace apex_mp::step {
namespace {

DeviceGrads& on_device(std::vector<DeviceGrads>& plain, const at::Device& device) {
  for (DeviceGrads& each : plain) {
    if (each.device == device) return each;
  }
  plain.push_back({device, {}, {}});
  return plain.back();
}

// Returns the gradient itself if it is sharded in another way than its parameter.
const at::Tensor& part_of_grad(const at::Tensor& grad, PyObject* param) {
  if (&local_part(grad) == &grad) return grad;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(grad));
  const pybind11::object summed = summed_grad(object.ptr(), param);
  if (!summed.is(object)) pybind11::setattr(param, "grad", summed);  // `grad` is this one then.
  return divided_alike(summed.ptr(), param) ? local_part(grad) : grad;
}

}  // namespace

void DeviceGrads::insert(int64_t row, const at::Tensor& grad) {
  const auto place = std::lower_bound(rows.begin(), rows.end(), row) - rows.begin();
  rows.insert(rows.begin() + place, row);
  grads.insert(grads.begin() + place, grad);
}

std::vector<at::ScalarType> DeviceGrads::dtypes() const {
  std::vector<at::ScalarType> found;
  for (const at::Tensor& grad : grads) {
    const at::ScalarType dtype = grad.scalar_type();
    if (std::find(found.begin(), found.end(), dtype) == found.end()) found.push_back(dtype);
  }
  return found;
}

// Called from C++, because Python would make a list of the gradients, and the operator another one.
void DeviceGrads::check(const at::Tensor& found_inf, const at::Tensor& sum_sq) const {
  using Check = void(at::TensorList, at::IntArrayRef, const at::Tensor&, const at::Tensor&);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("apex_mp::check_", "").typed<Check>();
  op.call(grads, rows, found_inf, sum_sq);
}

Grads read_grads(PyObject* params) {
  Grads found;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    const bool is_part = local_part(param) != param;
    found.has_parts |= is_part;
    // A subclass may make its gradient when it is read.
    if (!is_part && !THPVariable_CheckExact(param)) {
      found.others.push_back(i);
      continue;
    }
    const at::Tensor& whole = tensor_of(param).unsafeGetTensorImpl()->grad();  // grad() may warn.
    if (!whole.defined()) continue;
    const at::Tensor& grad = is_part ? part_of_grad(whole, param) : whole;
    if (!is_plain(grad) || !has_kernels(grad.device())) {
      found.others.push_back(i);
      continue;
    }
    DeviceGrads& here = on_device(found.plain, grad.device());
    here.rows.push_back(i);
    here.grads.push_back(grad);
  }
  return found;
}

}  // namespace apex_mp::step

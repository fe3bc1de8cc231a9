// Gradients, cut by device.
#include "step/read_grads.h"

#include "step/python_tensors.h"
#include "step/row_checks.h"

namespace apex_mp::step {
namespace {

DeviceGrads& on_device(std::vector<DeviceGrads>& plain, const at::Device& device) {
  for (DeviceGrads& each : plain) {
    if (each.device == device) return each;
  }
  plain.push_back({device, {}, {}});
  return plain.back();
}

}  // namespace

Grads read_grads(PyObject* params) {
  Grads found;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    if (!THPVariable_CheckExact(param)) {  // A class of its own may make gradients when asked.
      found.others.push_back(i);
      continue;
    }
    const at::Tensor& grad = tensor_of(param).unsafeGetTensorImpl()->grad();  // grad() may warn.
    if (!grad.defined()) continue;
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

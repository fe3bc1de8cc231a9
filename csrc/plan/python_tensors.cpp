// The local tensors of DTensors.
#include "plan/python_tensors.h"

#include <pybind11/pybind11.h>

#include <string>

namespace apex_mp::step {

namespace py = pybind11;

namespace {

py::object spec_of(PyObject* tensor) {
  return py::reinterpret_borrow<py::object>(tensor).attr("_spec");
}

}  // namespace

PyObject* local_part(PyObject* tensor) {
  if (!tensor_of(tensor).key_set().has(c10::DispatchKey::Python)) return tensor;
  static PyObject* const name = interned("_local_tensor");
  PyObject* local = PyObject_GetAttr(tensor, name);
  if (local == nullptr) {
    PyErr_Clear();  // Another wrapper, which the checks refuse by its dispatch key.
    return tensor;
  }
  Py_DECREF(local);  // The DTensor keeps it.
  return local;
}

const at::Tensor& local_part(const at::Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python)) return tensor;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  PyObject* part = local_part(object.ptr());
  return part == object.ptr() ? tensor : tensor_of(part);
}

bool divided_alike(PyObject* one, PyObject* other) {
  const py::object found = spec_of(one);
  const py::object expected = spec_of(other);
  if (found.is(expected)) return true;  // As FSDP2 has it.
  const auto equal = [&](const char* name) { return found.attr(name).equal(expected.attr(name)); };
  return equal("placements") && equal("mesh");
}

py::object summed_grad(PyObject* grad, PyObject* param) {
  const auto itself = py::reinterpret_borrow<py::object>(grad);
  if (local_part(grad) == grad || divided_alike(grad, param)) return itself;
  bool is_sum = false;
  for (const py::handle each : spec_of(grad).attr("placements")) {
    is_sum |= each.attr("is_partial")().cast<bool>();
  }
  if (!is_sum) return itself;
  return itself.attr("redistribute")(py::arg("placements") = spec_of(param).attr("placements"));
}

PyObject* local_grad(PyObject* grad, PyObject* param, const Place& place) {
  PyObject* local = local_part(grad);
  if (local == grad) return grad;  // The caller has given what this process holds.
  const auto placements = [](PyObject* tensor) {
    return std::string(py::str(spec_of(tensor).attr("placements")));
  };
  TORCH_CHECK(divided_alike(grad, param), place.caller, ": ", place.list, '[', place.group, "][",
              place.index, "] is a DTensor with the placements ", placements(grad),
              ", its parameter has ", placements(param), "; redistribute() it");
  return local;
}

}  // namespace apex_mp::step

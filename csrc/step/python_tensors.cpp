// What lies behind the wrappers of torch.distributed.
#include "step/python_tensors.h"

#include <pybind11/pybind11.h>

#include <string>

namespace apex_mp::step {

namespace py = pybind11;

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

PyObject* local_grad(PyObject* grad, PyObject* param, const Place& place) {
  PyObject* local = local_part(grad);
  if (local == grad) return grad;  // The caller has given what this process holds.
  const auto spec_of = [](PyObject* tensor) {
    return py::reinterpret_borrow<py::object>(tensor).attr("_spec");
  };
  const py::object expected = spec_of(param);
  const py::object found = spec_of(grad);
  if (found.is(expected)) return local;  // As FSDP2 has it.
  const auto equal = [&](const char* name) { return found.attr(name).equal(expected.attr(name)); };
  const auto placements = [](const py::object& spec) {
    return std::string(py::str(spec.attr("placements")));
  };
  TORCH_CHECK(equal("placements") && equal("mesh"), place.caller, ": ", place.list, '[',
              place.group, "][", place.index, "] is a DTensor with the placements ",
              placements(found), ", its parameter has ", placements(expected),
              "; redistribute() it");
  return local;
}

}  // namespace apex_mp::step

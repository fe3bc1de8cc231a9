// The tensors of Python objects: borrowed, without a copy or a reference count. For all files that
// read Python's lists.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include "plan/row_checks.h"

namespace apex_mp::step {

// Parameter and other subclasses too. THPVariable_Check is expensive for subclasses.
inline bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

// Lives as long as the object does.
inline const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

// Returns the part of a DTensor that this process holds, or another tensor as it is. The DTensor
// owns it. Calls Python.
PyObject* local_part(PyObject* tensor);

// The same for a tensor that has a Python object.
const at::Tensor& local_part(const at::Tensor& tensor);

// Whether two DTensors are sharded in the same way.
bool divided_alike(PyObject* one, PyObject* other);

// As local_part, for the gradient of a DTensor. Throws a sentence that names the place unless it is
// sharded as the parameter is.
PyObject* local_grad(PyObject* grad, PyObject* param, const Place& place);

// Returns an interned string. Python's literals are the same object, so pointers can be compared.
inline PyObject* interned(const char* text) {
  PyObject* string = PyUnicode_InternFromString(text);
  if (string == nullptr) throw pybind11::error_already_set();
  return string;
}

// An entry of a dictionary, borrowed; nullptr if there is none.
inline PyObject* entry(PyObject* dictionary, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dictionary, key);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return value;
}

// Returns the gradient of a DTensor, summed over processes if each has a part of the sum (Partial),
// by the collective that torch's own operators take; else the gradient itself.
pybind11::object summed_grad(PyObject* grad, PyObject* param);

}  // namespace apex_mp::step

// What lies behind the wrappers of torch.distributed.
#include "step/python_tensors.h"

namespace apex_mp::step {

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

}  // namespace apex_mp::step

// Options of a parameter group, from Python's numbers to ours.
#include "step/hyperparameters.h"

#include "op_checks.h"
#include "step/python_tensors.h"
#include "tensor_facts.h"

namespace apex_mp::step {
namespace {

constexpr const char* kCaller = "FusedAdam";

struct Names {
  PyObject* lr = interned("lr");
  PyObject* betas = interned("betas");
  PyObject* eps = interned("eps");
  PyObject* weight_decay = interned("weight_decay");
  PyObject* adam_w_mode = interned("adam_w_mode");
  PyObject* bias_correction = interned("bias_correction");
  PyObject* eps_inside_sqrt = interned("eps_inside_sqrt");
  PyObject* max_grad_norm = interned("max_grad_norm");
  PyObject* maximize = interned("maximize");
  PyObject* master_weights = interned("master_weights");
};

PyObject* option(PyObject* group, PyObject* name) {
  PyObject* value = entry(group, name);
  if (value != nullptr) return value;
  PyErr_SetObject(PyExc_KeyError, name);
  throw pybind11::error_already_set();
}

// Of an error of Python's, which is set, if the value is of a wrong type.
[[noreturn]] void refuse(const char* name, PyObject* value, const char* wish) {
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw pybind11::error_already_set();
  PyErr_Clear();
  throw pybind11::type_error(std::string(kCaller) + ": " + name + " is " +
                             std::string(pybind11::repr(value)) + "; it must be " + wish);
}

double as_double(const char* name, PyObject* value) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred() != nullptr) refuse(name, value, "a number");
  return number;
}

bool as_bool(PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  if (truth < 0) throw pybind11::error_already_set();
  return truth != 0;
}

std::pair<double, double> as_betas(PyObject* value) {
  const auto pair = pybind11::reinterpret_steal<pybind11::object>(PySequence_Tuple(value));
  if (!pair) refuse("betas", value, "two numbers in [0, 1)");
  if (PyTuple_GET_SIZE(pair.ptr()) != 2) {
    throw pybind11::value_error("FusedAdam: betas is " + std::string(pybind11::str(pair)) +
                                "; it must be two numbers in [0, 1)");
  }
  return {as_double("beta1", PyTuple_GET_ITEM(pair.ptr(), 0)),
          as_double("beta2", PyTuple_GET_ITEM(pair.ptr(), 1))};
}

}  // namespace

Number NumberReader::read(const char* name, PyObject* value) const {
  if (!is_tensor(value)) return {nullptr, true, as_double(name, value)};
  const at::Tensor& tensor = tensor_of(value);
  if (tensor.numel() != 1) {
    throw pybind11::value_error(std::string(kCaller) + ": " + name + " is a tensor of " +
                                std::to_string(tensor.numel()) + " elements; it must have 1");
  }
  const bool is_float = tensor.scalar_type() == at::kFloat;
  if (tensor.is_cpu() && (is_float || tensor.scalar_type() == at::kDouble)) {
    return {nullptr, true, number(tensor)};
  }
  if (tensor.is_cpu() || device_.is_cpu()) return {nullptr, true, tensor.item<double>()};
  const at::Tensor here = tensor.to(device_, is_float ? at::kFloat : at::kDouble, true);
  kept_.push_back(here);
  return {here.const_data_ptr(), !is_float, 1.0};
}

GroupOptions read_options(PyObject* param_group, const NumberReader& numbers) {
  static const Names names;
  const auto [beta1, beta2] = as_betas(option(param_group, names.betas));
  GroupOptions options;
  options.group.adam = {beta1,
                        beta2,
                        as_double("eps", option(param_group, names.eps)),
                        as_double("weight_decay", option(param_group, names.weight_decay)),
                        as_bool(option(param_group, names.adam_w_mode)),
                        as_bool(option(param_group, names.bias_correction)),
                        as_bool(option(param_group, names.eps_inside_sqrt))};
  check_adam_options(kCaller, options.group.adam);
  options.group.lr = numbers.read("lr", option(param_group, names.lr));
  options.group.max_norm = as_double("max_grad_norm", option(param_group, names.max_grad_norm));
  options.group.maximize = as_bool(option(param_group, names.maximize));
  options.group.has_norm = false;
  options.master_weights = as_bool(option(param_group, names.master_weights));
  return options;
}

}  // namespace apex_mp::step

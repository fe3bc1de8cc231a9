// Converts options of a parameter group from Python's numbers to ours.
#include "plan/hyperparameters.h"

#include <torch/csrc/Dtype.h>

#include "plan/python_tensors.h"
#include "tensor_facts.h"

namespace apex_mp::step {
namespace {

namespace py = pybind11;
using math::Option;
using math::Range;

constexpr Option kMaxGradNorm = {"max_grad_norm", Range::kNotNegative};

// The names of options that all rules have; a group may lack all but the first two.
struct Names {
  PyObject* lr = interned("lr");
  PyObject* max_grad_norm = interned("max_grad_norm");
  PyObject* maximize = interned("maximize");
  PyObject* master_weights = interned("master_weights");
  PyObject* moment_dtype = interned("moment_dtype");
  PyObject* stochastic_rounding = interned("stochastic_rounding");
  PyObject* amsgrad = interned("amsgrad");
};

PyObject* option_of(PyObject* group, PyObject* name) {
  PyObject* value = entry(group, name);
  if (value != nullptr) return value;
  PyErr_SetObject(PyExc_KeyError, name);
  throw py::error_already_set();
}

std::string sentence(const std::string& caller, const char* name, PyObject* value,
                     const std::string& wish) {
  return caller + ": " + name + " is " + std::string(py::repr(value)) + "; it must be " + wish;
}

// Throws Python's error, which is set; with a sentence if the value is of a wrong type.
[[noreturn]] void refuse(const std::string& caller, const char* name, PyObject* value,
                         const std::string& wish) {
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
  PyErr_Clear();
  throw py::type_error(sentence(caller, name, value, wish));
}

double as_double(const std::string& caller, const char* name, PyObject* value) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred() != nullptr) refuse(caller, name, value, "a number");
  return number;
}

bool as_bool(PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

bool has(PyObject* group, PyObject* name) {
  PyObject* value = entry(group, name);
  return value != nullptr && as_bool(value);
}

// A comparison with NaN is false, so NaN is in no range.
bool is_in(Range range, double number) {
  if (range == Range::kBelowOne) return 0.0 <= number && number < 1.0;
  if (range == Range::kZeroOrTwo) return number == 0.0 || number == 2.0;
  return range == Range::kNotNegative ? number >= 0.0 : number == number;
}

const char* wish_of(Range range) {
  if (range == Range::kBelowOne) return "in [0, 1)";
  if (range == Range::kZeroOrTwo) return "0 or 2";
  return range == Range::kNotNegative ? "0 or more" : "a number";
}

Masters masters_of(const std::string& caller, PyObject* group, PyObject* name) {
  PyObject* value = entry(group, name);
  if (value == nullptr) return Masters::kNone;
  if (!PyUnicode_Check(value)) return as_bool(value) ? Masters::kSplit : Masters::kNone;
  if (PyUnicode_CompareWithASCIIString(value, "float32") == 0) return Masters::kFloat;
  if (PyUnicode_CompareWithASCIIString(value, "split") == 0) return Masters::kSplit;
  throw py::value_error(
      sentence(caller, "master_weights", value, "True, False, 'split' or 'float32'"));
}

at::ScalarType moments_of(const std::string& caller, PyObject* group, PyObject* name,
                          bool takes_codes) {
  PyObject* value = entry(group, name);
  if (value == nullptr) return at::kFloat;
  const at::ScalarType dtype =
      THPDtype_Check(value) ? reinterpret_cast<THPDtype*>(value)->scalar_type : at::kByte;
  if (dtype == at::kFloat || dtype == at::kBFloat16 || (dtype == at::kChar && takes_codes)) {
    return dtype;
  }
  const char* wish = takes_codes ? "torch.float32, torch.bfloat16 or torch.int8"
                                 : "torch.float32 or torch.bfloat16";
  throw py::value_error(sentence(caller, "moment_dtype", value, wish));
}

}  // namespace

Number NumberReader::read(const char* name, PyObject* value) const {
  if (!is_tensor(value)) return {nullptr, true, as_double(caller_, name, value)};
  const at::Tensor& tensor = tensor_of(value);
  if (tensor.numel() != 1) {
    throw py::value_error(caller_ + ": " + name + " is a tensor of " +
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

OptionReader::OptionReader(const std::string& caller, const math::RuleFacts& rule)
    : caller_(caller), rule_(rule) {
  for (int i = 0; i < rule.option_count; ++i) names_.push_back(interned(rule.options[i].name));
}

double OptionReader::read_number(const Option& option, PyObject* value) const {
  const double number = as_double(caller_, option.name, value);
  if (is_in(option.range, number)) return number;
  throw py::value_error(sentence(caller_, option.name, value, wish_of(option.range)));
}

void OptionReader::read_option(const Option& option, PyObject* value, double* numbers) const {
  if (option.range == Range::kBool) {
    numbers[0] = as_bool(value);
    return;
  }
  if (option.count == 1) {
    numbers[0] = read_number(option, value);
    return;
  }
  const std::string wish = std::string("two numbers ") + wish_of(option.range);
  const auto items = py::reinterpret_steal<py::object>(PySequence_Tuple(value));
  if (!items) refuse(caller_, option.name, value, wish);
  if (PyTuple_GET_SIZE(items.ptr()) != option.count) {
    throw py::value_error(sentence(caller_, option.name, value, wish));
  }
  const std::string name = std::string("one of ") + option.name;
  for (int i = 0; i < option.count; ++i) {
    const Option item = {name.c_str(), option.range};
    numbers[i] = read_number(item, PyTuple_GET_ITEM(items.ptr(), i));
  }
}

GroupOptions OptionReader::read(PyObject* param_group, const NumberReader& numbers) const {
  static const Names names;
  GroupOptions options = {};
  double* next = options.group.options;
  for (int i = 0; i < rule_.option_count; ++i) {
    read_option(rule_.options[i], option_of(param_group, names_[i]), next);
    next += rule_.options[i].count;
  }
  options.group.lr = numbers.read("lr", option_of(param_group, names.lr));
  options.group.max_norm = read_number(kMaxGradNorm, option_of(param_group, names.max_grad_norm));
  options.group.maximize = has(param_group, names.maximize);
  options.moments = moments_of(caller_, param_group, names.moment_dtype, rule_.takes_codes);
  options.group.stochastic_rounding = has(param_group, names.stochastic_rounding);
  TORCH_CHECK_VALUE(!options.group.stochastic_rounding || options.moments != at::kFloat, caller_,
                    ": stochastic_rounding is True; it must be False unless moment_dtype is "
                    "torch.bfloat16 or torch.int8");
  TORCH_CHECK_VALUE(!options.group.stochastic_rounding || rule_.counts_steps, caller_,
                    ": stochastic_rounding is True; it must be False, because this optimizer "
                    "keeps no count of steps, from which random bits are made");
  options.masters = masters_of(caller_, param_group, names.master_weights);
  TORCH_CHECK(!has(param_group, names.amsgrad), caller_, " does not support the AMSGrad variant.");
  return options;
}

}  // namespace apex_mp::step

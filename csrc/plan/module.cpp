// Python bindings of the classes of csrc/plan/; apex_mp/_C.pyi has their types.
#include "plan/module.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "plan/device_loss_scale.h"
#include "plan/grad_versions.h"
#include "plan/masters.h"
#include "plan/plan.h"
#include "plan/python_tensors.h"
#include "plan/read_grads.h"

namespace apex_mp::step {

namespace py = pybind11;

namespace {

// Puts data into a parameter, maybe of another dtype. torch's set_data alone would then drop the
// node that accumulates the gradient, and with it the hooks of DistributedDataParallel.
void put_data(const at::Tensor& param, const at::Tensor& data) {
  // A tensor that never required grad has none yet.
  torch::autograd::AutogradMeta* meta = torch::autograd::impl::materialize_autograd_meta(param);
  const auto accumulator = meta->grad_accumulator_;
  param.set_data(data);
  meta->grad_accumulator_ = accumulator;
}

// Translates errors as torch does for its own functions: without the stack of C++ calls.
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const c10::TypeError& error) {
    py::set_error(PyExc_TypeError, error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    py::set_error(PyExc_ValueError, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    py::set_error(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

// GCOVR_EXCL_START: where names of arguments fill a line of their own, gcov counts only what would
// happen there if one of them threw.
void define_plan(py::module_& module) {
  py::class_<Plan>(module, "StepPlan")
      .def(py::init<const std::string&, const std::string&, const std::vector<std::string>&,
                    const std::vector<std::string>&, bool>(),
           py::arg("rule"), py::arg("caller"), py::kw_only(), py::arg("tensors"),
           py::arg("numbers"), py::arg("once") = false)
      .def(
          "read",
          [](Plan& plan, const py::list& param_groups, const py::dict& state,
             const py::dict& masters, const py::object& make_state, py::object grads,
             py::object grads_of, py::object copies, py::object scale,
             const std::vector<at::ScalarType>& unscale,
             const std::optional<std::vector<int32_t>>& only, const std::vector<Origin>& origins) {
            plan.read(param_groups, {state, masters, make_state},
                      {grads, grads_of, copies, scale, unscale, only, origins});
          },
          py::arg("param_groups"), py::arg("state"), py::arg("masters"), py::arg("make_state"),
          py::kw_only(), py::arg("grads"), py::arg("grads_of"), py::arg("copies"), py::arg("scale"),
          py::arg("unscale") = std::vector<at::ScalarType>(), py::arg("only") = py::none(),
          py::arg("origins") = std::vector<Origin>())
      .def(
          "check",
          [](Plan& plan, bool clip_by_global_norm, double clip_to) {
            plan.check({clip_by_global_norm, clip_to, py::none()});
          },
          py::kw_only(), py::arg("clip_by_global_norm"), py::arg("clip_to"))
      .def(
          "run",
          [](Plan& plan, const py::object& norms, const py::object& found_inf, bool check,
             bool clip_by_global_norm, std::optional<double> clip_to, py::object clip_norm,
             const DeviceLossScale* loss_scale, bool wait) {
            const Clip clip = {clip_by_global_norm, clip_to.value_or(-1.0), std::move(clip_norm)};
            return plan.run(norms, found_inf, check, clip, loss_scale, wait);
          },
          py::kw_only(), py::arg("norms"), py::arg("found_inf"), py::arg("check"),
          py::arg("clip_by_global_norm"), py::arg("clip_to"), py::arg("clip_norm"),
          py::arg("loss_scale"), py::arg("wait"))
      .def("clear", &Plan::clear)
      .def_property_readonly("gradients", &Plan::gradients)
      .def_property_readonly("without_grad", &Plan::without_grad)
      .def_property_readonly("can_run", &Plan::can_run)
      .def_property_readonly("has_run", &Plan::has_run)
      .def_property_readonly("has_others", &Plan::has_others)
      .def_property_readonly("has_parts", &Plan::has_parts)
      .def_property_readonly("grad_dtypes", &Plan::grad_dtypes)
      .def_property_readonly("outcome", &Plan::outcome)
      .def_property_readonly("found_inf", &Plan::found_inf)
      .def_property_readonly("norm", &Plan::norm)
      .def_static("read_outcome", &read_outcome)
      .def("refresh_groups", &Plan::refresh_groups);
}

void define_loss_scale(py::module_& module) {
  py::class_<DeviceLossScale>(module, "DeviceLossScale")
      .def(py::init([](const at::Tensor& state, const std::vector<double>& rule) {
             return DeviceLossScale(state, rule);
           }),
           py::arg("state"), py::arg("rule"));
}
// GCOVR_EXCL_STOP

}  // namespace

void define_classes(py::module_& module) {
  py::register_local_exception_translator(&translate);
  py::class_<Outcome>(module, "StepOutcome")
      .def_readonly("is_known", &Outcome::is_known)
      .def_readonly("found_inf", &Outcome::found_inf)
      .def_readonly("norms", &Outcome::norms)
      .def_readonly("nonfinite_rows", &Outcome::nonfinite_rows);
  define_plan(module);
  define_loss_scale(module);
  py::class_<GradVersions>(module, "GradVersions")
      .def(py::init<>())
      .def("record",
           [](GradVersions& versions, const py::list& params) { versions.record(params.ptr()); })
      .def("changed", [](const GradVersions& versions, const py::list& params) {
        return versions.changed(params.ptr());
      });
  py::class_<DeviceGrads>(module, "DeviceGrads")
      .def(py::init([](const at::Device& device) { return DeviceGrads{device, {}, {}}; }))
      .def("insert", &DeviceGrads::insert)
      .def("check", &DeviceGrads::check, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("dtypes", &DeviceGrads::dtypes)
      .def("__len__", [](const DeviceGrads& here) { return here.rows.size(); })
      .def_readonly("rows", &DeviceGrads::rows)
      .def_readonly("grads", &DeviceGrads::grads);
  module.def("read_grads", [](const py::list& params) {
    Grads found = read_grads(params.ptr());
    py::dict plain;
    for (DeviceGrads& here : found.plain) plain[py::cast(here.device)] = std::move(here);
    return py::make_tuple(plain, found.others, found.has_parts);
  });
  module.def("join_master", &join_master);    // (weight, remainder, master)
  module.def("split_master", &split_master);  // (master, weight, remainder)
  module.def("read_codes", &read_codes);      // (codes, exponents, numbers, which)
  module.def("write_codes", &write_codes);    // (numbers, codes, exponents, which)
  // What counts the writes to each tensor; 0 for those of inference mode, which have no count.
  module.def("versions", [](const py::list& tensors) {
    std::vector<int64_t> versions;
    versions.reserve(tensors.size());
    for (const py::handle& each : tensors) {
      const at::Tensor& tensor = tensor_of(each.ptr());
      versions.push_back(tensor.is_inference() ? 0 : tensor._version());
    }
    return versions;
  });
  module.def("put_data", &put_data);
  // Whether two lists hold the same objects: == would compare tensors by their elements.
  module.def("same_items", [](const py::list& one, const py::list& other) {
    const size_t size = one.size();
    if (size != other.size()) return false;
    for (size_t i = 0; i < size; ++i) {
      if (PyList_GET_ITEM(one.ptr(), i) != PyList_GET_ITEM(other.ptr(), i)) return false;
    }
    return true;
  });
}

}  // namespace apex_mp::step

// One walk over parameters, gradients and states for each step.
#include "step/adam_plan.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/ScopeExit.h>

#include "checks.h"
#include "cpu/step.h"
#include "step/row_memory.h"
#include "step/shared_grads.h"

namespace apex_mp::step {
namespace {

namespace py = pybind11;

PyObject* list_of(PyObject* param_group) {
  static PyObject* const name = interned("params");
  PyObject* params = entry(param_group, name);
  if (params == nullptr || !PyList_Check(params)) {
    throw py::type_error("FusedAdam: a parameter group has no list of 'params'");
  }
  return params;
}

void check_lengths(const py::object& lists, Py_ssize_t group, Py_ssize_t count) {
  if (lists.is_none()) return;
  PyObject* outer = lists.ptr();
  const bool fits = PyList_Check(outer) && group < PyList_GET_SIZE(outer) &&
                    PyList_Check(PyList_GET_ITEM(outer, group)) &&
                    PyList_GET_SIZE(PyList_GET_ITEM(outer, group)) == count;
  if (fits) return;
  throw py::value_error("FusedAdam: what was given for group " + std::to_string(group) +
                        " is not a list with one item for each of its " + std::to_string(count) +
                        " parameters");
}

// The caller's item for a parameter; nullptr for None, and where there is no list.
PyObject* item_of(const py::object& lists, const Place& place) {
  if (lists.is_none()) return nullptr;
  PyObject* item = PyList_GET_ITEM(PyList_GET_ITEM(lists.ptr(), place.group), place.index);
  return item == Py_None ? nullptr : item;
}

bool has_kernels(const at::Device& device) {
#ifdef APEX_MP_WITH_CUDA
  if (device.is_cuda()) return true;
#endif
  return device.is_cpu();
}

bool is_low_precision(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

void update(const LossScale& loss_scale, bool found_inf) {
  if (loss_scale.scale == nullptr) return;
  const math::LossScaleState now = {*loss_scale.scale, *loss_scale.good_steps,
                                    *loss_scale.overflows};
  const math::LossScaleState next = math::update_scale(now, found_inf, loss_scale.rule);
  *loss_scale.scale = next.scale;
  *loss_scale.good_steps = next.good_steps;
  *loss_scale.overflows = next.overflows;
}

[[noreturn]] void refuse_second_copy() {
  throw py::value_error(
      "FusedAdam.step: output_params was given with master_weights=True; give one of the two, "
      "each parameter has one low-precision copy");
}

}  // namespace

struct AdamPlan::Item {
  Place place;
  PyObject* param;
  PyObject* state;
  bool master_weights;
  bool scaled = true;
  bool writes_grad = false;
  const at::Tensor* copy = nullptr;
};

Indices AdamPlan::read(const py::list& param_groups, const py::dict& state, const Given& given) {
  TORCH_CHECK(!running_, "FusedAdam: another thread is taking a step with this optimizer");
  clear();
  try {
    read_all(param_groups, state, given);
  } catch (...) {
    clear();  // A step that is refused leaves nothing alive.
    throw;
  }
  return needs_;
}

void AdamPlan::read_all(const py::list& param_groups, const py::dict& state, const Given& given) {
  needs_.clear();
  without_grad_.clear();
  list_params(param_groups);
  device_ = params_.empty() ? at::Device(at::kCPU) : tensor_of(params_.front()).device();
  can_run_ = has_kernels(device_);
  const NumberReader numbers(device_, kept_);
  order_.find(params_, state.ptr(), states_);
  int64_t group = 0;
  for (const py::handle each : param_groups) {
    const GroupOptions options = read_options(each.ptr(), numbers);
    task_.groups.push_back(options.group);
    const Py_ssize_t count = PyList_GET_SIZE(list_of(each.ptr()));
    for (const py::object* lists : {&given.grads, &given.grads_of, &given.copies}) {
      check_lengths(*lists, group, count);
    }
    for (Py_ssize_t index = 0; index < count; ++index) {
      items_.push_back(
          {static_cast<int32_t>(group), static_cast<int32_t>(index), options.master_weights});
    }
    ++group;
  }
  read_rows(given);
  if (!given.unscale.empty()) separate_shared_grads(tensors_, task_.rows, kept_);
  task_.scale = numbers.read("scale", given.scale.ptr());
  read_norms(given.norms, numbers);
  is_read_ = true;
}

// First, by several threads if there are many, the parameters whose tensors are all as usual: that
// calls nothing of Python, whose lock this thread holds meanwhile. Then the others, one by one.
void AdamPlan::read_rows(const Given& given) {
  constexpr int64_t kRowsPerThread = 256;
  const auto count = static_cast<int64_t>(items_.size());
  tensors_.resize(count);
  task_.rows.resize(count);
  at::parallel_for(0, count, kRowsPerThread, [&](int64_t begin, int64_t end) {
    constexpr int64_t kRowsAhead = 16;
    for (int64_t first = begin; first < end; first += kRowsAhead) {
      const int64_t last = std::min(first + kRowsAhead, end);
      for (int64_t i = first; i < last; ++i) {
        items_[i].is_read = can_run_ && read_usual(item_at(i), given, tensors_[i]);
        if (items_[i].is_read) fetch_storages(tensors_[i]);
      }
      for (int64_t i = first; i < last; ++i) {
        if (items_[i].is_read) task_.rows[i] = memory_of(tensors_[i]);
      }
    }
  });
  int64_t rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (items_[i].is_read) {
      if (rows != i) {
        tensors_[rows] = tensors_[i];
        task_.rows[rows] = task_.rows[i];
      }
      ++rows;
    } else if (read_unusual(item_at(i), given, tensors_[rows])) {
      task_.rows[rows] = memory_of(tensors_[rows]);
      ++rows;
    }
  }
  tensors_.resize(rows);
  task_.rows.resize(rows);
}

AdamPlan::Item AdamPlan::item_at(int64_t position) const {
  const ItemFacts& facts = items_[position];
  return {{"params", facts.group, facts.index},
          params_[position],
          states_[position],
          facts.master_weights};
}

// Tensors and rows own nothing; the next step writes over them.
void AdamPlan::clear() {
  is_read_ = false;
  task_.groups.clear();
  params_.clear();
  items_.clear();
  kept_.clear();
  made_.clear();
  laid_anew_.clear();
}

void AdamPlan::list_params(const py::list& param_groups) {
  for (const py::handle group : param_groups) {
    PyObject* params = list_of(group.ptr());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
      PyObject* param = PyList_GET_ITEM(params, i);
      if (!is_tensor(param)) {
        throw py::type_error(std::string("FusedAdam: a parameter is a ") + Py_TYPE(param)->tp_name +
                             "; it must be a tensor");
      }
      params_.push_back(param);
    }
  }
}

// Returns false, with nothing said yet, where something is not as usual: `read_unusual` looks then.
bool AdamPlan::read_usual(const Item& item, const Given& given, RowTensors& row) const {
  if (!is_tensor(item.param)) return false;
  const at::Tensor& param = tensor_of(item.param);
  if (param.device() != device_) return false;
  PyObject* source = item_of(given.grads, item.place);
  row = {};
  row.group = static_cast<int32_t>(item.place.group);
  if (!given.grads.is_none()) {
    if (source == nullptr) return false;
    row.grad = &tensor_of(source);
  } else {
    source = item_of(given.grads_of, item.place);
    row.scaled = source != nullptr || given.grads_of.is_none();
    if (source == nullptr) source = item.param;
    if (!THPVariable_CheckExact(source)) return false;
    row.grad = &tensor_of(source).unsafeGetTensorImpl()->grad();  // grad() itself may warn.
  }
  if (!row.grad->defined() || row.grad->layout() != at::kStrided) return false;
  row.writes_grad = given.unscales(*row.grad, row.scaled);
  return take_usual(item, given, read_usual_state(item.state), row);
}

bool AdamPlan::take_usual(const Item& item, const Given& given, const AdamState& state,
                          RowTensors& row) const {
  const at::Tensor& param = tensor_of(item.param);
  const bool with_master = item.master_weights && is_low_precision(param);
  if (!state.is_complete(with_master)) return false;
  PyObject* copy = item_of(given.copies, item.place);
  if (copy != nullptr && copy != item.param) {
    if (with_master) return false;
    row.copy = &tensor_of(copy);
  }
  row.take(state, param, with_master);
  return QuickTest(param).passes(row);
}

// On CUDA a parameter with a state and no gradient has a row all the same, which is not stepped: so
// the table on the device stays as it is while gradients come and go. The row says of the gradient
// what is to be expected of the next one.
bool AdamPlan::read_without_grad(const Item& item, const Given& given, PyObject* source,
                                 RowTensors& row) const {
  const at::Tensor& param = tensor_of(item.param);
  const bool keeps_row = device_.is_cuda() && param.device() == device_;
  if (!keeps_row) return false;
  const bool with_master = item.master_weights && is_low_precision(param);
  row = {};
  row.group = static_cast<int32_t>(item.place.group);
  row.scaled = item.scaled;
  row.param_of_grad = source == nullptr ? &param : &tensor_of(source);
  row.writes_grad = given.unscales(*row.param_of_grad, row.scaled);
  return take_usual(item, given, read_state(item.state, with_master), row);
}

// Returns whether the parameter is to be stepped, and throws a sentence if it cannot be.
bool AdamPlan::read_unusual(Item item, const Given& given, RowTensors& row) {
  const at::Tensor* grad = nullptr;
  PyObject* source = nullptr;
  if (!given.grads.is_none()) {
    PyObject* object = item_of(given.grads, item.place);
    grad = object == nullptr ? nullptr : &tensor_of(object);
  } else {
    source = item_of(given.grads_of, item.place);
    item.scaled = source != nullptr || given.grads_of.is_none();
    grad = grad_of(source == nullptr ? item.param : source);
  }
  if (grad == nullptr || !grad->defined()) {
    without_grad_.emplace_back(item.place.group, item.place.index);
    return read_without_grad(item, given, source, row);
  }
  TORCH_CHECK(grad->layout() == at::kStrided,
              "FusedAdam does not support sparse gradients, please consider SparseAdam instead");
  item.writes_grad = given.unscales(*grad, item.scaled);
  can_run_ &= tensor_of(item.param).device() == device_;
  if (!can_run_) return false;
  PyObject* copy = item_of(given.copies, item.place);
  if (copy != nullptr && copy != item.param) item.copy = &tensor_of(copy);
  return check_row(item, *grad, row);
}

// A subclass may make its gradient when it is asked for it, as MasterParameter does.
const at::Tensor* AdamPlan::grad_of(PyObject* param) {
  if (THPVariable_CheckExact(param)) return &tensor_of(param).grad();
  made_.push_back(py::reinterpret_borrow<py::object>(param).attr("grad"));
  return made_.back().is_none() ? nullptr : &tensor_of(made_.back().ptr());
}

const at::Tensor& AdamPlan::laid_like(const at::Tensor& param, const at::Tensor& grad,
                                      bool writes_grad) {
  const bool as_it_is = lie_alike(grad, param) && !grad.is_neg();
  const bool can_be_copied = grad.sizes() == param.sizes() && is_plain(param) &&
                             !grad.key_set().has(c10::DispatchKey::Python);
  if (as_it_is || !can_be_copied) return grad;
  TORCH_CHECK(!writes_grad || at::has_internal_overlap(grad) != at::MemOverlap::Yes,
              "FusedAdam: elements of a gradient with strides ", grad.strides(),
              " share memory, so it cannot be unscaled in place; clone() it or construct the "
              "optimizer with unscale_grads=False");
  kept_.push_back(at::empty_like(param, param.options().dtype(grad.scalar_type())));
  kept_.back().copy_(grad);
  if (writes_grad) laid_anew_.emplace_back(grad, kept_.back());
  return kept_.back();
}

bool AdamPlan::check_row(const Item& item, const at::Tensor& grad, RowTensors& row) {
  const at::Tensor& param = tensor_of(item.param);
  const bool with_master = item.master_weights && is_low_precision(param);
  if (with_master && item.copy != nullptr) refuse_second_copy();
  const AdamState state = read_state(item.state, with_master);
  row = {};
  row.grad = &laid_like(param, grad, item.writes_grad);
  row.group = static_cast<int32_t>(item.place.group);
  row.scaled = item.scaled;
  row.writes_grad = item.writes_grad;
  row.copy = item.copy;
  check_given(item, *row.grad);
  check_state(state, param, item.place);
  if (!state.is_complete(with_master) || lies_otherwise(state, param)) {
    needs_.emplace_back(item.place.group, item.place.index);
    return false;
  }
  row.take(state, param, with_master);
  return true;
}

void AdamPlan::check_given(const Item& item, const at::Tensor& grad) {
  const at::Tensor& param = tensor_of(item.param);
  check_param(param, item.place);
  check_peer(grad, item.place.in("grads"), param, item.place);
  if (item.copy != nullptr) {
    check_peer(*item.copy, item.place.in("output_params"), param, item.place);
  }
}

void AdamPlan::read_norms(const py::object& norms, const NumberReader& numbers) {
  for (size_t group = 0; !norms.is_none() && group < task_.groups.size(); ++group) {
    PyObject* norm = PyList_GET_ITEM(norms.ptr(), group);
    task_.groups[group].has_norm = norm != Py_None;
    if (norm != Py_None) task_.groups[group].norm = numbers.read("grad_norms", norm);
  }
}

// Returns whether the host knows already that the step is to be skipped.
bool AdamPlan::read_found_inf(const py::object& found_inf) {
  task_.found_inf = nullptr;
  if (found_inf.is_none()) return false;
  const Number number = NumberReader(device_, kept_).read("found_inf", found_inf.ptr());
  if (number.pointer == nullptr) return number.value != 0.0;
  TORCH_CHECK(!number.is_double, "FusedAdam: found_inf is not of dtype float32");
  task_.found_inf = static_cast<const float*>(number.pointer);
  return false;
}

Outcome AdamPlan::run(const py::object& found_inf, bool check, bool clip_by_global_norm,
                      const DeviceLossScale* loss_scale, bool wait) {
  TORCH_INTERNAL_ASSERT(is_read_ && can_run_ && needs_.empty());
  TORCH_INTERNAL_ASSERT(loss_scale == nullptr || found_inf.is_none());
  const auto end = c10::make_scope_exit([this] { clear(); });
  task_.clip_by_global_norm = clip_by_global_norm;
  task_.check = check;
  const LossScale scale = loss_scale == nullptr ? LossScale{} : loss_scale->memory(device_);
  Outcome outcome;
  outcome.found_inf = read_found_inf(found_inf);
  if (outcome.found_inf) return outcome;
  if (takes_long(wait)) {
    outcome = run_beside_python(scale, wait);
  } else {
    outcome = run_on_device(scale, wait);
    if (!outcome.found_inf) bump_versions_of_rows();
  }
  // Where the host does not know that the step was skipped, the copies are unchanged.
  if (!outcome.found_inf) {
    for (const auto& [grad, laid] : laid_anew_) grad.copy_(laid);
  }
  return outcome;
}

void AdamPlan::bump_versions_of_rows() const {
  constexpr int64_t kRowsPerThread = 512;
  const auto count = static_cast<int64_t>(tensors_.size());
  at::parallel_for(0, count, kRowsPerThread, [this](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) tensors_[i].each_written(&bump_version);
  });
}

bool AdamPlan::takes_long(bool wait) const {
  if (device_.is_cuda()) return wait;
  constexpr int64_t kManyElements = 1 << 20;  // about a millisecond
  int64_t elements = 0;
  for (const Row& row : task_.rows) elements += row.size;
  return elements >= kManyElements;
}

// Lets other Python threads run meanwhile. They may set a gradient to None: so its tensors are held
// while the step lasts, which would be expensive for many tiny ones.
Outcome AdamPlan::run_beside_python(const LossScale& loss_scale, bool wait) {
  std::vector<at::Tensor> written;
  std::vector<at::Tensor> read;
  for (const RowTensors& row : tensors_) {
    row.each_written([&](const at::Tensor& tensor) { written.push_back(tensor); });
    if (row.grad != nullptr) read.push_back(*row.grad);
  }
  running_ = true;
  const auto end = c10::make_scope_exit([this] { running_ = false; });
  const py::gil_scoped_release released;
  Outcome outcome = run_on_device(loss_scale, wait);
  if (!outcome.found_inf) bump_versions(written);
  return outcome;
}

Outcome AdamPlan::run_on_device(const LossScale& loss_scale, [[maybe_unused]] bool wait) {
#ifdef APEX_MP_WITH_CUDA
  if (device_.is_cuda()) return stepper_.run(task_, loss_scale, wait, device_);
#endif
  Outcome outcome = cpu::run(task_, workspace_);
  update(loss_scale, outcome.found_inf);
  return outcome;
}

at::Tensor AdamPlan::outcome() const {
#ifdef APEX_MP_WITH_CUDA
  return stepper_.outcome();
#else
  TORCH_CHECK(false, "apex_mp: this build has no CUDA");
#endif
}

Outcome read_outcome([[maybe_unused]] const at::Tensor& bytes) {
#ifdef APEX_MP_WITH_CUDA
  return cuda::read_outcome(bytes);
#else
  TORCH_CHECK(false, "apex_mp: this build has no CUDA");
#endif
}

void AdamPlan::refresh_groups() {
#ifdef APEX_MP_WITH_CUDA
  if (device_.is_cuda()) stepper_.refresh_groups(task_, device_);
#endif
  clear();
}

}  // namespace apex_mp::step

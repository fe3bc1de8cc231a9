// The step plan: one walk over parameters, gradients and states for each step.
#include "plan/plan.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/ScopeExit.h>

#include "checks.h"
#include "cpu/step/step.h"
#include "plan/row_memory.h"
#include "plan/shared_grads.h"

namespace apex_mp::step {
namespace {

namespace py = pybind11;

PyObject* list_of(const std::string& caller, PyObject* param_group) {
  static PyObject* const name = interned("params");
  PyObject* params = entry(param_group, name);
  if (params == nullptr || !PyList_Check(params)) {
    throw py::type_error(caller + ": a parameter group has no list of 'params'");
  }
  return params;
}

void check_lengths(const std::string& caller, const py::object& lists, Py_ssize_t group,
                   Py_ssize_t count) {
  if (lists.is_none()) return;
  PyObject* outer = lists.ptr();
  const bool fits = PyList_Check(outer) && group < PyList_GET_SIZE(outer) &&
                    PyList_Check(PyList_GET_ITEM(outer, group)) &&
                    PyList_GET_SIZE(PyList_GET_ITEM(outer, group)) == count;
  if (fits) return;
  throw py::value_error(caller + ": what was given for group " + std::to_string(group) +
                        " is not a list with one item for each of its " + std::to_string(count) +
                        " parameters");
}

void update(const LossScale& loss_scale, bool found_inf) {
  if (loss_scale.state == nullptr) return;
  *loss_scale.state = math::update_scale(*loss_scale.state, found_inf, loss_scale.rule);
}

// The number of a parameter in the optimizer.
size_t position_of(int32_t number, const Given& given) {
  return given.origins.empty() ? number : std::get<2>(given.origins[number]);
}

int32_t rule_named(const std::string& name) {
  int32_t rule = 0;
  while (rule < math::AllRules::kCount && math::AllRules::facts(rule).name != name) ++rule;
  TORCH_CHECK(rule < math::AllRules::kCount, "StepPlan: rule is '", name,
              "', which the built extension does not have; build apex_mp again");
  return rule;
}

}  // namespace

struct Plan::Item {
  Place place;    // in the optimizer, for messages
  int64_t group;  // where it stands in the lists
  int64_t index;
  PyObject* key;    // the parameter
  PyObject* param;  // or its part in this process
  PyObject* state;
  PyObject* master;
  RequiredState required;
  bool scaled = true;
  bool writes_grad = false;
  const at::Tensor* copy = nullptr;

  // Returns the caller's item for the parameter; nullptr for None, or without a list.
  PyObject* of(const py::object& lists) const {
    if (lists.is_none()) return nullptr;
    PyObject* item = PyList_GET_ITEM(PyList_GET_ITEM(lists.ptr(), group), index);
    return item == Py_None ? nullptr : item;
  }
};

struct Plan::Source {
  PyObject* grad;   // the gradient itself, if the caller has given it
  PyObject* param;  // else whose .grad it is; nullptr with grad == nullptr: there is none
  bool scaled;

  // nullptr: there is none, or only Python can return it.
  const at::Tensor* usual_grad() const {
    if (grad != nullptr) return &tensor_of(grad);
    if (param == nullptr || !THPVariable_CheckExact(param)) return nullptr;
    return &tensor_of(param).unsafeGetTensorImpl()->grad();  // grad() itself may warn.
  }
};

Plan::Plan(const std::string& rule, const std::string& caller,
           const std::vector<std::string>& tensors, const std::vector<std::string>& numbers,
           bool once)
    : caller_(caller),
      once_(once),
      rule_(math::AllRules::facts(rule_named(rule))),
      options_(caller, rule_) {
  task_.rule = rule_named(rule);
  task_.caller = caller_.c_str();
  TORCH_INTERNAL_ASSERT(static_cast<int>(tensors.size()) == rule_.tensors);
  TORCH_INTERNAL_ASSERT(static_cast<int>(numbers.size()) == rule_.numbers);
  for (size_t i = 0; i < tensors.size(); ++i) {
    names_.tensors[i] = interned(tensors[i].c_str());
    names_.exponents[i] = interned((tensors[i] + "_exponents").c_str());
  }
  for (size_t i = 0; i < numbers.size(); ++i) names_.numbers[i] = interned(numbers[i].c_str());
}

void Plan::read(const py::list& param_groups, const States& states, const Given& given) {
  TORCH_CHECK(!running_, caller_, ": another thread is taking a step with this optimizer");
  clear();
  try {
    read_all(param_groups, states, given);
  } catch (...) {
    clear();  // A step that is refused leaves nothing alive.
    throw;
  }
}

void Plan::read_all(const py::list& param_groups, const States& states, const Given& given) {
  without_grad_.clear();
  has_run_ = false;
  has_parts_ = false;
  list_params(param_groups);
  list_items(param_groups, given);
  device_ =
      items_.empty() ? at::Device(at::kCPU) : tensor_of(params_[items_.front().number]).device();
  can_run_ = has_kernels(device_);
  const NumberReader numbers(caller_, device_, kept_);
  state_order_.find(caller_, params_, states.state.ptr(), states_);
  masters_order_.find(caller_, params_, states.masters.ptr(), masters_);
  if (states.make.is_none()) {
    states_.assign(params_.size(), nullptr);
    masters_.assign(params_.size(), nullptr);
  }
  for (const py::handle each : param_groups) {
    const GroupOptions options = options_.read(each.ptr(), numbers);
    task_.groups.push_back(options.group);
    required_state_.push_back(states.make.is_none()
                                  ? RequiredState{0, 0, options.moments, Masters::kNone, false}
                                  : RequiredState{rule_.tensors_with(options.group.options),
                                                  rule_.needs_numbers ? rule_.numbers : 0,
                                                  options.moments, options.masters, false});
  }
  read_rows(states, given);
  grad_dtypes_ = 0;
  for (const Row& row : task_.rows) {
    if (row.grad.data != nullptr) grad_dtypes_ |= 1u << static_cast<uint32_t>(row.grad.dtype);
  }
  if (!given.unscale.empty()) separate_shared_grads(caller_, tensors_, task_.rows, kept_);
  task_.scale = numbers.read("scale", given.scale.ptr());
  is_read_ = true;
}

// First reads the parameters whose tensors are all usual, by several threads if there are many:
// that does not call Python, whose lock this thread holds. Then reads the others, one by one.
void Plan::read_rows(const States& states, const Given& given) {
  constexpr int64_t kRowsPerThread = 256;
  const auto count = static_cast<int64_t>(items_.size());
  tensors_.resize(count);
  task_.rows.resize(count);
  at::parallel_for(0, count, kRowsPerThread, [&](int64_t begin, int64_t end) {
    constexpr int64_t kRowsAhead = 16;
    for (int64_t first = begin; first < end; first += kRowsAhead) {
      const int64_t last = std::min(first + kRowsAhead, end);
      for (int64_t i = first; i < last; ++i) {
        items_[i].is_read = can_run_ && read_usual(item_at(i, given), given, tensors_[i]);
        tensors_[i].position = position_of(items_[i].number, given);
        if (items_[i].is_read) fetch_storages(tensors_[i]);
      }
      for (int64_t i = first; i < last; ++i) {
        if (!items_[i].is_read) continue;
        task_.rows[i] = memory_of(tensors_[i]);
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
    } else if (read_unusual(item_at(i, given), states, given, tensors_[rows])) {
      tensors_[rows].position = position_of(items_[i].number, given);
      task_.rows[rows] = memory_of(tensors_[rows]);
      ++rows;
    }
  }
  tensors_.resize(rows);
  task_.rows.resize(rows);
}

Plan::Item Plan::item_at(int64_t item, const Given& given) const {
  const ItemFacts& facts = items_[item];
  const auto [group, index, number] = given.origins.empty()
                                          ? Origin{facts.group, facts.index, facts.number}
                                          : given.origins[facts.number];
  PyObject* param = params_[facts.number];
  return {{caller_.c_str(), "params", group, index},
          facts.group,
          facts.index,
          param,
          param,
          states_[facts.number],
          masters_[facts.number],
          required_state_[facts.group].of(tensor_of(param))};
}

void Plan::list_items(const py::list& param_groups, const Given& given) {
  int32_t group = 0;
  for (const py::handle each : param_groups) {
    const Py_ssize_t count = PyList_GET_SIZE(list_of(caller_, each.ptr()));
    for (const py::object* lists : {&given.grads, &given.grads_of, &given.copies}) {
      check_lengths(caller_, *lists, group, count);
    }
    for (Py_ssize_t index = 0; index < count; ++index) {
      items_.push_back({group, static_cast<int32_t>(index), static_cast<int32_t>(items_.size())});
    }
    ++group;
  }
  TORCH_INTERNAL_ASSERT(given.origins.empty() || given.origins.size() == items_.size());
  if (!given.only.has_value()) return;
  const std::vector<ItemFacts> all = std::exchange(items_, {});
  for (const int32_t number : *given.only) items_.push_back(all.at(number));
}

// Tensors and rows own nothing, and the next step overwrites them.
void Plan::clear() {
  is_read_ = false;
  task_.groups.clear();
  params_.clear();
  items_.clear();
  required_state_.clear();
  kept_.clear();
  made_.clear();
  laid_anew_.clear();
}

void Plan::list_params(const py::list& param_groups) {
  for (const py::handle group : param_groups) {
    PyObject* params = list_of(caller_, group.ptr());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
      PyObject* param = PyList_GET_ITEM(params, i);
      if (!is_tensor(param)) {
        throw py::type_error(caller_ + ": a parameter is a " + Py_TYPE(param)->tp_name +
                             "; it must be a tensor");
      }
      params_.push_back(param);
    }
  }
}

// Returns the gradient to step a parameter with.
Plan::Source Plan::source_of(const Item& item, const Given& given) const {
  if (!given.grads.is_none()) return {item.of(given.grads), nullptr, true};
  PyObject* param = item.of(given.grads_of);
  if (param != nullptr) return {nullptr, param, true};
  return {nullptr, item.param, given.grads_of.is_none()};
}

// Returns false, without an error, if a tensor is not usual: then `read_unusual` reads the row.
bool Plan::read_usual(const Item& item, const Given& given, RowTensors& row) const {
  if (!is_tensor(item.param)) return false;
  if (tensor_of(item.param).device() != device_) return false;
  const Source source = source_of(item, given);
  row = {};
  row.grad = source.usual_grad();
  if (row.grad == nullptr || !row.grad->defined() || row.grad->layout() != at::kStrided) {
    return false;
  }
  row.group = static_cast<int32_t>(item.group);
  row.scaled = source.scaled;
  row.writes_grad = given.unscales(*row.grad, row.scaled);
  return take_usual(item, given, read_usual_state(item.state, item.master, names_), row);
}

bool Plan::take_usual(const Item& item, const Given& given, const State& state,
                      RowTensors& row) const {
  if (!state.is_complete(item.required)) return false;
  PyObject* copy = item.of(given.copies);
  if (copy != nullptr && copy != item.param) {
    if (item.required.masters != Masters::kNone) return false;
    row.copy = &tensor_of(copy);
  }
  const at::Tensor& param = tensor_of(item.param);
  row.take(state, item.required, param);
  return QuickTest(param, item.required).passes(row);
}

// On CUDA a parameter with a state but no gradient also has a row, which is not stepped, so that
// the table on the device need not change with the gradients. The row has the dtype that the next
// gradient will probably have.
bool Plan::read_without_grad(const Item& item, const Given& given, const Source& source,
                             RowTensors& row) const {
  const at::Tensor& param = tensor_of(item.param);
  const bool keeps_row = device_.is_cuda() && param.device() == device_;
  if (!keeps_row) return false;
  row = {};
  row.group = static_cast<int32_t>(item.group);
  row.scaled = source.scaled;
  row.param_of_grad = source.param == nullptr ? &param : &tensor_of(source.param);
  row.writes_grad = given.unscales(*row.param_of_grad, row.scaled);
  return take_usual(item, given, read_state(item.state, item.master, names_), row);
}

// Returns whether there is a row.
bool Plan::read_unusual(Item item, const States& states, const Given& given, RowTensors& row) {
  PyObject* part = local_part(item.param);
  const bool is_part = part != item.param;
  has_parts_ |= is_part;  // also without a gradient, which other processes may have
  const Source source = source_of(item, given);
  PyObject* object = grad_of(source);
  if (object == nullptr) {
    without_grad_.emplace_back(item.group, item.index);
    return read_without_grad(item, given, source, row);
  }
  if (is_part) {
    made_.push_back(summed_grad(object, item.param));
    const bool is_new = made_.back().ptr() != object;
    if (is_new && source.param != nullptr) {
      py::setattr(source.param, "grad", made_.back());
    }
    object = made_.back().ptr();
    object = local_grad(object, item.param, item.place.in("grads"));
    item.param = part;
  }
  const at::Tensor* grad = &tensor_of(object);
  TORCH_CHECK(grad->layout() == at::kStrided, caller_, " does not support sparse gradients",
              rule_.sparse_advice);
  item.scaled = source.scaled;
  item.writes_grad = given.unscales(*grad, item.scaled);
  can_run_ &= tensor_of(item.param).device() == device_;
  if (!can_run_) return false;
  PyObject* copy = item.of(given.copies);
  if (copy != nullptr && copy != item.param) item.copy = &tensor_of(copy);
  check_row(item, states, *grad, row);
  return true;
}

// Returns nullptr if there is none. A subclass may make its gradient when it is read, as
// MasterParameter does.
PyObject* Plan::grad_of(const Source& source) {
  if (source.param == nullptr) return source.grad;
  const bool has_none =
      THPVariable_CheckExact(source.param) && !tensor_of(source.param).grad().defined();
  if (has_none) return nullptr;
  made_.push_back(py::reinterpret_borrow<py::object>(source.param).attr("grad"));
  return made_.back().is_none() ? nullptr : made_.back().ptr();
}

const at::Tensor& Plan::laid_like(const at::Tensor& param, const at::Tensor& grad,
                                  bool writes_grad) {
  const bool as_it_is = lie_alike(grad, param) && !grad.is_neg();
  const bool can_be_copied = grad.sizes() == param.sizes() && is_plain(param) &&
                             !grad.key_set().has(c10::DispatchKey::Python);
  if (as_it_is || !can_be_copied) return grad;
  TORCH_CHECK(!writes_grad || at::has_internal_overlap(grad) != at::MemOverlap::Yes, caller_,
              ": elements of a gradient with strides ", grad.strides(),
              " share memory, so it cannot be unscaled in place; clone() it or construct the "
              "optimizer with unscale_grads=False");
  kept_.push_back(at::empty_like(param, param.options().dtype(grad.scalar_type())));
  kept_.back().copy_(grad);
  if (writes_grad) laid_anew_.emplace_back(grad, kept_.back());
  return kept_.back();
}

void Plan::check_row(const Item& item, const States& states, const at::Tensor& grad,
                     RowTensors& row) {
  const at::Tensor& param = tensor_of(item.param);
  TORCH_CHECK_VALUE(item.required.masters == Masters::kNone || item.copy == nullptr, caller_,
                    ".step: output_params was given with master_weights; give one of the two, "
                    "each parameter has one low-precision copy");
  State state = read_state(item.state, item.master, names_);
  if (state.master != nullptr && (tensor_of(state.master).sizes() != param.sizes() ||
                                  tensor_of(state.master).device() != param.device())) {
    state.master = nullptr;  // The parameter was resized or moved.
  }
  row = {};
  row.grad = &laid_like(param, grad, item.writes_grad);
  row.group = static_cast<int32_t>(item.group);
  row.scaled = item.scaled;
  row.writes_grad = item.writes_grad;
  row.copy = item.copy;
  check_given(item, *row.grad);
  check_state(state, names_, item.required, param, item.place);
  if (!state.is_complete(item.required) || lies_otherwise(state, item.required, param)) {
    made_.push_back(states.make(item.group, item.index));
    PyObject* master = entry(states.masters.ptr(), item.key);
    state = read_state(made_.back().ptr(), master, names_);
    TORCH_INTERNAL_ASSERT(state.is_complete(item.required));
    TORCH_CHECK(
        !lies_otherwise(state, item.required, param), caller_, ": params[", item.place.group, "][",
        item.place.index,
        "] is a DTensor whose part here lies in memory in another order than its state; load "
        "the state anew");
  }
  row.take(state, item.required, param);
}

void Plan::check_given(const Item& item, const at::Tensor& grad) const {
  const at::Tensor& param = tensor_of(item.param);
  check_param(param, item.place);
  check_peer(grad, item.place.in("grads"), param, item.place);
  if (item.copy != nullptr) {
    check_peer(*item.copy, item.place.in("output_params"), param, item.place);
  }
}

void Plan::read_norms(const py::object& norms, const NumberReader& numbers) {
  TORCH_INTERNAL_ASSERT(norms.is_none() || py::len(norms) == task_.groups.size());
  for (size_t group = 0; !norms.is_none() && group < task_.groups.size(); ++group) {
    PyObject* norm = PyList_GET_ITEM(norms.ptr(), group);
    task_.groups[group].has_norm = norm != Py_None;
    if (norm != Py_None) task_.groups[group].norm = numbers.read("grad_norms", norm);
  }
}

// Returns whether the host knows already that the step is skipped.
bool Plan::read_found_inf(const py::object& found_inf) {
  task_.found_inf = nullptr;
  if (found_inf.is_none()) return false;
  const Number number = NumberReader(caller_, device_, kept_).read("found_inf", found_inf.ptr());
  if (number.pointer == nullptr) return number.value != 0.0;
  TORCH_CHECK(!number.is_double, caller_, ": found_inf is not of dtype float32");
  task_.found_inf = static_cast<const float*>(number.pointer);
  return false;
}

// Calls visit(number) for each row, by several threads if there are many.
template <typename Visit>
void Plan::each_row(const Visit& visit) const {
  constexpr int64_t kRowsPerThread = 512;
  const auto count = static_cast<int64_t>(tensors_.size());
  at::parallel_for(0, count, kRowsPerThread, [&visit](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) visit(i);
  });
}

void Plan::read_clip(const Clip& clip, const NumberReader& numbers) {
  task_.clip_by_global_norm = clip.by_global_norm;
  task_.clip_to = clip.to;
  task_.has_clip_norm = !clip.norm.is_none();
  if (task_.has_clip_norm) task_.clip_norm = numbers.read("clip_norm", clip.norm.ptr());
}

void Plan::check(const Clip& clip) {
  TORCH_INTERNAL_ASSERT(is_read_ && can_run_);
  const auto end = c10::make_scope_exit([this] { clear(); });
  checked_.forget();
  read_clip(clip, NumberReader(caller_, device_, kept_));
  task_.check = true;
  task_.found_inf = nullptr;
  // As gradients are now: another thread may write them while this one does not hold Python's lock.
  Checked checked;
  checked.record(task_, tensors_);
  run_passes(Passes::kCheck, {}, false);
  checked_ = std::move(checked);
}

Outcome Plan::run(const py::object& norms, const py::object& found_inf, bool check,
                  const Clip& clip, const DeviceLossScale* loss_scale, bool wait) {
  TORCH_INTERNAL_ASSERT(is_read_ && can_run_);
  TORCH_INTERNAL_ASSERT(loss_scale == nullptr || found_inf.is_none());
  const auto end = c10::make_scope_exit([this] { clear(); });
  const NumberReader numbers(caller_, device_, kept_);
  read_norms(norms, numbers);
  read_clip(clip, numbers);
  task_.check = check;
  const LossScale scale =
      loss_scale == nullptr ? LossScale{} : loss_scale->memory(caller_, device_);
  Outcome outcome;
  outcome.found_inf = read_found_inf(found_inf);
  const bool is_checked = loss_scale == nullptr && checked_.fits(task_, tensors_);
  checked_.forget();
  if (outcome.found_inf) return outcome;
  outcome = run_passes(is_checked ? Passes::kUpdate : Passes::kAll, scale, wait);
  has_run_ = !outcome.found_inf;
  // If the host does not know that the step was skipped, the copies are unchanged.
  if (!outcome.found_inf) {
    for (const auto& [grad, laid] : laid_anew_) grad.copy_(laid);
  }
  return outcome;
}

DeviceGrads Plan::gradients() const {
  DeviceGrads found = {device_, {}, {}};
  for (const RowTensors& row : tensors_) {
    if (row.grad == nullptr) continue;
    found.rows.push_back(static_cast<int64_t>(row.position));
    found.grads.push_back(*row.grad);
  }
  return found;
}

std::vector<at::ScalarType> Plan::grad_dtypes() const {
  std::vector<at::ScalarType> dtypes;
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    if (grad_dtypes_ >> static_cast<uint32_t>(dtype_of(dtype)) & 1u) dtypes.push_back(dtype);
  }
  return dtypes;
}

bool Plan::takes_long(bool wait) const {
  if (device_.is_cuda()) return wait;
  constexpr int64_t kManyElements = 1 << 20;  // about a millisecond
  int64_t elements = 0;
  for (const Row& row : task_.rows) elements += row.size;
  return elements >= kManyElements;
}

Outcome Plan::run_passes(Passes passes, const LossScale& loss_scale, bool wait) {
  if (takes_long(wait)) return run_beside_python(passes, loss_scale, wait);
  Outcome outcome = run_on_device(passes, loss_scale, wait);
  if (!outcome.found_inf && passes != Passes::kCheck) {
    each_row([this](int64_t row) { tensors_[row].each_written(&bump_version); });
  }
  return outcome;
}

// Lets other Python threads run during the step. They may set a gradient to None, so the step owns
// its tensors meanwhile, which would be expensive for many tiny ones.
Outcome Plan::run_beside_python(Passes passes, const LossScale& loss_scale, bool wait) {
  std::vector<at::Tensor> written;
  std::vector<at::Tensor> read;
  for (const RowTensors& row : tensors_) {
    row.each_written([&](const at::Tensor& tensor) { written.push_back(tensor); });
    if (row.grad != nullptr) read.push_back(*row.grad);
  }
  running_ = true;
  const auto end = c10::make_scope_exit([this] { running_ = false; });
  const py::gil_scoped_release released;
  Outcome outcome = run_on_device(passes, loss_scale, wait);
  if (!outcome.found_inf && passes != Passes::kCheck) bump_versions(written);
  return outcome;
}

Outcome Plan::run_on_device(Passes passes, const LossScale& loss_scale,
                            [[maybe_unused]] bool wait) {
#ifdef APEX_MP_WITH_CUDA
  if (device_.is_cuda()) return stepper_.run(task_, passes, loss_scale, wait, once_, device_);
#endif
  Outcome outcome = cpu::run(task_, passes, workspace_);
  update(loss_scale, outcome.found_inf);
  return outcome;
}

at::Tensor Plan::outcome() const {
#ifdef APEX_MP_WITH_CUDA
  return stepper_.outcome();
#else
  TORCH_CHECK(false, "apex_mp: this build has no CUDA");
#endif
}

at::Tensor Plan::found_inf() const {
#ifdef APEX_MP_WITH_CUDA
  if (device_.is_cuda()) return stepper_.found_inf();
#endif
  return at::scalar_tensor(workspace_.outcome.found_inf, at::TensorOptions().dtype(at::kFloat));
}

at::Tensor Plan::norm() const {
#ifdef APEX_MP_WITH_CUDA
  if (device_.is_cuda()) return stepper_.norm();
#endif
  return at::scalar_tensor(workspace_.outcome.norm, at::TensorOptions().dtype(at::kDouble));
}

Outcome read_outcome([[maybe_unused]] const at::Tensor& bytes) {
#ifdef APEX_MP_WITH_CUDA
  return cuda::read_outcome(bytes);
#else
  TORCH_CHECK(false, "apex_mp: this build has no CUDA");
#endif
}

void Plan::refresh_groups() {
#ifdef APEX_MP_WITH_CUDA
  if (device_.is_cuda()) stepper_.refresh_groups(task_, device_);
#endif
  clear();
}

}  // namespace apex_mp::step

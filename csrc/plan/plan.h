// The step plan of an optimizer: converts Python's lists to a task, in nanoseconds a tensor. Python
// calls it, through module.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/step/step.h"
#ifdef APEX_MP_WITH_CUDA
#include "cuda/step/stepper.h"
#endif
#include "plan/checked.h"
#include "plan/device_loss_scale.h"
#include "plan/hyperparameters.h"
#include "plan/read_grads.h"
#include "plan/row_memory.h"
#include "plan/state_order.h"
#include "plan/task.h"

namespace apex_mp::step {

// Group and index of a parameter.
using Indices = std::vector<std::pair<int64_t, int64_t>>;

// Where a parameter that a plan steps, or of which it steps a part, stands in the optimizer: its
// group, or -1 if there are none, its index there, and its number among all.
using Origin = std::tuple<int32_t, int32_t, int32_t>;

// The caller's arguments beside parameters and state. Each of the first three is None, or a list
// with one list for each group, which has one item for each parameter.
struct Given {
  pybind11::object grads;     // the gradients; an item is None where there is none
  pybind11::object grads_of;  // the parameter whose .grad to take; None: the stepped one's own,
                              // which is not scaled then
  pybind11::object copies;    // where the new parameter is also written; None: nowhere
  pybind11::object scale;     // a number: scaled gradients are divided by it
  std::vector<at::ScalarType> unscale;  // a step that is taken leaves scaled gradients of these
                                        // dtypes unscaled
  std::optional<std::vector<int32_t>> only;  // the numbers of the parameters to read; else all
  std::vector<Origin> origins;  // of each parameter, if they are not the optimizer's own

  bool unscales(const at::Tensor& grad, bool scaled) const {
    return scaled && std::find(unscale.begin(), unscale.end(), grad.scalar_type()) != unscale.end();
  }
};

// How a step clips.
struct Clip {
  bool by_global_norm;    // groups are clipped by the norm of all of them
  double to;              // before that, scaled gradients are clipped to this norm; negative: not
  pybind11::object norm;  // their norm, unscaled; None: it is measured
};

// Owns no tensor. Between steps it keeps the order of the state, and empty lists with their
// capacity. Everything else is read from Python's objects in each step, so nothing must be
// invalidated when a tensor is replaced, moved, reshaped or reloaded.
class Plan {
 public:
  // Where a step finds the state of parameters and their masters, by parameter. `make(group,
  // index)` is called for a parameter that lacks state or master, or has them in another memory
  // order; it puts a master into `masters` and returns new state. The caller removes the state if
  // the step is refused or skipped. If `make` is None, gradients are read alone.
  struct States {
    const pybind11::dict& state;
    const pybind11::dict& masters;
    const pybind11::object& make;
  };

  // `rule` is the kName of one of math/rules.h, `caller` the optimizer's name in messages, and
  // `tensors` and `numbers` the names of its state in the order of the rule. A plan that steps
  // `once` may do so while a CUDA graph is captured.
  Plan(const std::string& rule, const std::string& caller, const std::vector<std::string>& tensors,
       const std::vector<std::string>& numbers, bool once);

  // Reads and checks everything. Throws a sentence for a parameter that cannot be stepped.
  void read(const pybind11::list& param_groups, const States& states, const Given& given);

  // Checks and measures the gradients that were read, for a step of the same task, and does not
  // take it: found_inf() and norm() say what was found.
  void check(const Clip& clip);

  // Takes the step that was read; what `check` has found is used if all is as it was then. Writes
  // nothing if `found_inf` (None, or one number) is not 0, or with `check` if gradients hold inf or
  // NaN. `norms` is None, or for each group None or the norm of its gradients before unscaling.
  // `loss_scale` is updated, unless it is nullptr; it excludes `found_inf`. The outcome is known
  // with `wait`, and always on the CPU.
  Outcome run(const pybind11::object& norms, const pybind11::object& found_inf, bool check,
              const Clip& clip, const DeviceLossScale* loss_scale, bool wait);

  // The result of the last step on a CUDA device, valid until the next step or check: bytes, to be
  // copied to the host for read_outcome().
  at::Tensor outcome() const;

  // Of the last step or check whose outcome the host was not given: one float32 number, not 0 if
  // the step was or will be skipped; and the norm of all unscaled gradients, float64.
  at::Tensor found_inf() const;
  at::Tensor norm() const;

  // Instead of `run`: makes the step of a captured CUDA graph use the present options of groups.
  void refresh_groups();

  // Between `read` and `run`: the gradients that will be used.
  DeviceGrads gradients() const;

  // Drops what was read.
  void clear();

  // Of what was read: the parameters without a gradient, and whether `run` can step all others:
  // they must be on one device with kernels.
  const Indices& without_grad() const { return without_grad_; }
  bool can_run() const { return can_run_; }

  // Whether a step was taken with what was read last, or may have been, where the host does not
  // know.
  bool has_run() const { return has_run_; }

  // The dtypes of the gradients that were read.
  std::vector<at::ScalarType> grad_dtypes() const;

  // Whether there are states or masters of what is no parameter, as after one was replaced.
  bool has_others() const { return state_order_.has_others() || masters_order_.has_others(); }

  // Whether parts of DTensors were read; `run` does not combine inf, NaN and norms over processes.
  bool has_parts() const { return has_parts_; }

 private:
  struct Item;    // one parameter while it is read
  struct Source;  // which gradient it is stepped with
  struct ItemFacts {
    int32_t group;
    int32_t index;
    int32_t number;  // among all parameters
    bool is_read = false;
  };

  void read_all(const pybind11::list& param_groups, const States& states, const Given& given);
  void list_params(const pybind11::list& param_groups);
  void read_rows(const States& states, const Given& given);
  Item item_at(int64_t item, const Given& given) const;
  void list_items(const pybind11::list& param_groups, const Given& given);
  bool read_usual(const Item& item, const Given& given, RowTensors& row) const;
  bool take_usual(const Item& item, const Given& given, const State& state, RowTensors& row) const;
  bool read_without_grad(const Item& item, const Given& given, const Source& source,
                         RowTensors& row) const;
  bool read_unusual(Item item, const States& states, const Given& given, RowTensors& row);
  void check_row(const Item& item, const States& states, const at::Tensor& grad, RowTensors& row);
  Source source_of(const Item& item, const Given& given) const;
  void read_norms(const pybind11::object& norms, const NumberReader& numbers);
  bool read_found_inf(const pybind11::object& found_inf);
  bool takes_long(bool wait) const;
  template <typename Visit>
  void each_row(const Visit& visit) const;
  void read_clip(const Clip& clip, const NumberReader& numbers);
  Outcome run_passes(Passes passes, const LossScale& loss_scale, bool wait);
  Outcome run_beside_python(Passes passes, const LossScale& loss_scale, bool wait);
  Outcome run_on_device(Passes passes, const LossScale& loss_scale, bool wait);
  void check_given(const Item& item, const at::Tensor& grad) const;
  PyObject* grad_of(const Source& source);
  const at::Tensor& laid_like(const at::Tensor& param, const at::Tensor& grad, bool writes_grad);

  const std::string caller_;
  [[maybe_unused]] const bool once_;  // without CUDA
  const math::RuleFacts& rule_;
  const OptionReader options_;
  StateNames names_;
  StateOrder state_order_;
  StateOrder masters_order_;
  std::vector<PyObject*> params_;  // these four only while a step is read
  std::vector<PyObject*> states_;
  std::vector<PyObject*> masters_;
  std::vector<ItemFacts> items_;
  std::vector<RequiredState> required_state_;  // of each group
  Task task_;
  Checked checked_;
  cpu::Workspace workspace_;
  std::vector<RowTensors> tensors_;  // of task_.rows
  std::deque<at::Tensor> kept_;      // what one step has made for itself; rows point to it
  std::vector<pybind11::object>
      made_;  // gradients and states that Python has made while it was asked
  // Gradients to be written whose memory order is not their parameter's, and their copies.
  std::vector<std::pair<at::Tensor, at::Tensor>> laid_anew_;
  Indices without_grad_;
  at::Device device_ = at::kCPU;
  bool is_read_ = false;
  bool can_run_ = true;
  bool has_run_ = false;
  bool has_parts_ = false;
  uint32_t grad_dtypes_ = 0;  // bit i: there is one of DType i
  bool running_ = false;      // beside Python: without the lock that it holds otherwise
#ifdef APEX_MP_WITH_CUDA
  cuda::Stepper stepper_;
#endif
};

Outcome read_outcome(const at::Tensor& bytes);

}  // namespace apex_mp::step

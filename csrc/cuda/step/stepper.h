// Takes optimizer steps on one CUDA device for a plan; owns the device's table of what to step.
// plan/plan.cpp calls it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "plan/task.h"

namespace apex_mp::cuda {

class Stepper {
 public:
  Stepper();
  ~Stepper();

  // Launches the step, or these passes of it, on the device's current stream. Without `wait` the
  // host does not wait, and does not know the outcome. A stepper that steps `once` may step in a
  // capture: its table is then a part of the graph.
  step::Outcome run(const step::Task& task, step::Passes passes, const step::LossScale& loss_scale,
                    bool wait, bool once, const c10::Device& device);

  // The result of the last step on the device, valid until the next step or check: bytes, for
  // read_outcome(); a float that is not 0 if the step was skipped; and the norm of all unscaled
  // gradients, a double.
  at::Tensor outcome() const;
  at::Tensor found_inf() const;
  at::Tensor norm() const;

  // Makes a captured step use the present options of the groups.
  void refresh_groups(const step::Task& task, const c10::Device& device);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What bytes say that have been copied to the host.
step::Outcome read_outcome(const at::Tensor& bytes);

}  // namespace apex_mp::cuda

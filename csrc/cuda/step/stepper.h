// Takes optimizer steps on one CUDA device for a plan; owns the device's table of what to step.
// step/plan.cpp calls it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "step/task.h"

namespace apex_mp::cuda {

class Stepper {
 public:
  Stepper();
  ~Stepper();

  // Launches the step on the device's current stream. The host waits only if it is to: else it does
  // not know the outcome. A stepper that steps `once` may do so in a capture: its table is a part
  // of the graph then.
  step::Outcome run(const step::Task& task, const step::LossScale& loss_scale, bool wait, bool once,
                    const c10::Device& device);

  // What the last step leaves on the device, until the next one: bytes, for read_outcome().
  at::Tensor outcome() const;

  // Has a captured step use the options that the groups have now.
  void refresh_groups(const step::Task& task, const c10::Device& device);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What bytes say that have been copied to the host.
step::Outcome read_outcome(const at::Tensor& bytes);

}  // namespace apex_mp::cuda

// The task whose gradients were checked last: an equal one need not check them again. For the plan.
#pragma once

#include <c10/core/TensorImpl.h>

#include <vector>

#include "step/row_memory.h"
#include "step/task.h"

namespace apex_mp::step {

// Owns no tensor. A write to a gradient increments its version counter; if nothing else owns the
// counter, the gradient is gone, whatever lies at its address now.
class Checked {
 public:
  void record(const Task& task, const std::vector<RowTensors>& tensors);
  void forget() { grads_.clear(); }

  // Whether a task is the one that was recorded, and no gradient was written since.
  bool fits(const Task& task, const std::vector<RowTensors>& tensors) const;

 private:
  struct Grad {
    const at::TensorImpl* tensor;
    c10::VariableVersion counter;
    int64_t version;

    bool is(const at::Tensor* grad) const;
  };

  std::vector<Grad> grads_;  // of each row; empty if nothing was recorded
  std::vector<Row> rows_;
  std::vector<Group> groups_;
  Number scale_;
  double clip_to_ = -1.0;
  bool clip_by_global_norm_ = false;
};

}  // namespace apex_mp::step

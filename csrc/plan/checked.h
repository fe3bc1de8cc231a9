// The task whose gradients were checked last: an equal one need not check them again. For the plan.
#pragma once

#include <vector>

#include "plan/row_memory.h"
#include "plan/task.h"
#include "plan/tensor_version.h"

namespace apex_mp::step {

// Owns no tensor.
class Checked {
 public:
  void record(const Task& task, const std::vector<RowTensors>& tensors);
  void forget() { grads_.clear(); }

  // Whether a task is the one that was recorded, and no gradient was written since.
  bool fits(const Task& task, const std::vector<RowTensors>& tensors) const;

 private:
  struct Grad {
    TensorVersion tensor;
    int64_t number_versions = 0;  // of the row's state: pass 1 prepares by these numbers

    bool is_of(const RowTensors& row) const;
  };

  std::vector<Grad> grads_;  // of each row; empty if nothing was recorded
  std::vector<Row> rows_;
  std::vector<Group> groups_;
  Number scale_;
  double clip_to_ = -1.0;
  bool clip_by_global_norm_ = false;
};

}  // namespace apex_mp::step

// What a check of gradients was made for.
#include "step/checked.h"

#include <algorithm>

namespace apex_mp::step {

void Checked::record(const Task& task, const std::vector<RowTensors>& tensors) {
  forget();
  for (const RowTensors& row : tensors) {
    if (row.grad != nullptr && row.grad->is_inference()) {  // A write could not be detected.
      forget();
      return;
    }
    if (row.grad == nullptr) {
      grads_.push_back({nullptr, c10::VariableVersion(), 0});
      continue;
    }
    const c10::VariableVersion& counter = row.grad->unsafeGetTensorImpl()->version_counter();
    grads_.push_back({row.grad->unsafeGetTensorImpl(), counter, counter.current_version()});
  }
  rows_ = task.rows;
  groups_ = task.groups;
  scale_ = task.scale;
  clip_to_ = task.clip_to;
  clip_by_global_norm_ = task.clip_by_global_norm;
}

bool Checked::Grad::is(const at::Tensor* grad) const {
  if (grad == nullptr || tensor == nullptr) return grad == nullptr && tensor == nullptr;
  return grad->unsafeGetTensorImpl() == tensor && !counter.unique() &&
         counter.current_version() == version;
}

bool Checked::fits(const Task& task, const std::vector<RowTensors>& tensors) const {
  if (grads_.empty() || !task.check || task.found_inf != nullptr || task.has_clip_norm) {
    return false;
  }
  return std::equal(grads_.begin(), grads_.end(), tensors.begin(), tensors.end(),
                    [](const Grad& grad, const RowTensors& row) { return grad.is(row.grad); }) &&
         rows_ == task.rows && groups_ == task.groups && scale_ == task.scale &&
         clip_to_ == task.clip_to && clip_by_global_norm_ == task.clip_by_global_norm;
}

}  // namespace apex_mp::step

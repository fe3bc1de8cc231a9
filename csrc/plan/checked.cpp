// What a check of gradients was made for.
#include "plan/checked.h"

#include <algorithm>
#include <utility>

namespace apex_mp::step {
namespace {

// Counts all writes to the numbers of a row's state.
int64_t versions_of(const at::Tensor* const (&numbers)[math::kMaxNumbers]) {
  int64_t versions = 0;
  for (const at::Tensor* number : numbers) {
    if (number == nullptr || number->is_inference()) continue;
    versions += number->unsafeGetTensorImpl()->version_counter().current_version();
  }
  return versions;
}

}  // namespace

void Checked::record(const Task& task, const std::vector<RowTensors>& tensors) {
  forget();
  for (const RowTensors& row : tensors) {
    Grad grad;
    grad.number_versions = versions_of(row.numbers);
    if (row.grad != nullptr) {
      if (row.grad->is_inference()) {  // A write could not be detected.
        forget();
        return;
      }
      grad.tensor = TensorVersion(*row.grad);
    }
    grads_.push_back(std::move(grad));
  }
  rows_ = task.rows;
  groups_ = task.groups;
  scale_ = task.scale;
  clip_to_ = task.clip_to;
  clip_by_global_norm_ = task.clip_by_global_norm;
}

bool Checked::Grad::is_of(const RowTensors& row) const {
  if (versions_of(row.numbers) != number_versions) return false;
  return row.grad == nullptr ? tensor.is_empty() : tensor.is(*row.grad);
}

bool Checked::fits(const Task& task, const std::vector<RowTensors>& tensors) const {
  if (grads_.empty() || !task.check) return false;
  return std::equal(grads_.begin(), grads_.end(), tensors.begin(), tensors.end(),
                    [](const Grad& grad, const RowTensors& row) { return grad.is_of(row); }) &&
         rows_ == task.rows && groups_ == task.groups && scale_ == task.scale &&
         clip_to_ == task.clip_to && clip_by_global_norm_ == task.clip_by_global_norm;
}

}  // namespace apex_mp::step

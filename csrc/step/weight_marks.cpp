// Marks on weights, and the comparison with them.
#include "step/weight_marks.h"

namespace apex_mp::step {
namespace {

bool is_split(const RowTensors& row) {
  return row.copy != nullptr && row.copy->scalar_type() == at::kShort && row.grad != nullptr &&
         !row.param->is_inference() && !row.copy->is_inference();
}

// What is likely to be another number when the weight is written.
uint64_t facts_of(const at::Tensor& weight) {
  if (!weight.is_cpu()) return weight.unsafeGetTensorImpl()->version_counter().current_version();
  constexpr int64_t kSamples = 8;
  const auto* halves = static_cast<const uint16_t*>(weight.const_data_ptr());
  const int64_t step = std::max<int64_t>(weight.numel() / kSamples, 1);
  uint64_t facts = 0;
  for (int64_t i = 0; i < weight.numel(); i += step) facts = facts * 0x10001u + halves[i];
  return facts;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

void WeightMarks::take(const std::vector<RowTensors>& rows) {
  for (const RowTensors& row : rows) {
    if (!is_split(row)) continue;
    if (marks_.size() <= row.position) marks_.resize(row.position + 1);
    marks_[row.position] = {row.param->unsafeGetTensorImpl(), row.copy->unsafeGetTensorImpl(),
                            version_of(*row.copy), facts_of(*row.param)};
  }
}

bool WeightMarks::differs(const RowTensors& row) const {
  if (!is_split(row) || marks_.size() <= row.position) return false;
  const Mark& mark = marks_[row.position];
  const bool is_marked = mark.weight == row.param->unsafeGetTensorImpl() &&
                         mark.remainder == row.copy->unsafeGetTensorImpl() &&
                         mark.remainder_version == version_of(*row.copy);
  return is_marked && mark.weight_facts != facts_of(*row.param);
}

}  // namespace apex_mp::step

// Records and compares weights of split masters.
#include "step/weight_versions.h"

namespace apex_mp::step {
namespace {

bool is_split(const RowTensors& row) {
  return row.copy != nullptr && row.copy->scalar_type() == at::kShort && row.grad != nullptr &&
         !row.param->is_inference() && !row.copy->is_inference();
}

// Returns a number that will probably change when the weight is written.
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

void WeightVersions::record(const std::vector<RowTensors>& rows) {
  for (const RowTensors& row : rows) {
    if (!is_split(row)) continue;
    if (entries_.size() <= row.position) entries_.resize(row.position + 1);
    entries_[row.position] = {row.param->unsafeGetTensorImpl(), row.copy->unsafeGetTensorImpl(),
                              version_of(*row.copy), facts_of(*row.param)};
  }
}

bool WeightVersions::changed(const RowTensors& row) const {
  if (!is_split(row) || entries_.size() <= row.position) return false;
  const Entry& entry = entries_[row.position];
  const bool is_recorded = entry.weight == row.param->unsafeGetTensorImpl() &&
                           entry.remainder == row.copy->unsafeGetTensorImpl() &&
                           entry.remainder_version == version_of(*row.copy);
  return is_recorded && entry.weight_facts != facts_of(*row.param);
}

}  // namespace apex_mp::step

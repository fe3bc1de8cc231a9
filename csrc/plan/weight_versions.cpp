// Records and compares weights under masters.
#include "plan/weight_versions.h"

#include <algorithm>

namespace apex_mp::step {
namespace {

// The remainder of a split master is the copy of its weight; of a whole one the weight is the copy.
bool is_split(const Row& memory) { return memory.copy.dtype == DType::kRemainder; }

bool has_master(const RowTensors& row) {
  return row.has_master && row.grad != nullptr && !row.param->is_inference() &&
         !row.copy->is_inference();
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Returns a hash of version and address, on the CPU also of sampled elements; for a split master on
// the CPU of sampled elements and the dtype alone.
uint64_t fingerprint_of(const at::Tensor& weight, const Row& memory) {
  uint64_t hash = 0;
  const Array& array = is_split(memory) ? memory.param : memory.copy;
  if (weight.device().type() == at::kCPU) {
    constexpr int64_t kSamples = 8;
    const auto* halves = static_cast<const uint16_t*>(array.data);
    const int64_t step = std::max<int64_t>((memory.size + kSamples - 1) / kSamples, 1);
    uint64_t factor = 1;  // does not depend on what is read
    for (int64_t i = 0; i < memory.size; i += step, factor *= 0x10001u) hash += factor * halves[i];
    // With a remainder nothing can be compared, so equal numbers that were written count as none.
    if (is_split(memory)) return 2 * hash + (array.dtype == DType::kHalf ? 1 : 0);
  }
  hash = hash * 0x9e3779b97f4a7c15u + version_of(weight);
  return hash * 0x9e3779b97f4a7c15u + reinterpret_cast<uintptr_t>(array.data);
}

}  // namespace

WeightVersions::Entry WeightVersions::entry_of(const RowTensors& row, const Row& memory) {
  const bool split = is_split(memory);
  const at::Tensor& master = split ? *row.copy : *row.param;
  const at::Tensor& weight = split ? *row.param : *row.copy;
  return {master.unsafeGetTensorImpl(), version_of(master),
          (split ? memory.param : memory.copy).dtype, fingerprint_of(weight, memory)};
}

WeightVersions::Change WeightVersions::change_between(const Entry& before, const Entry& now,
                                                      bool split) {
  const bool is_new = before.master != now.master;
  if (split) {
    // A new remainder belongs to the weight that it was made or loaded with.
    if (is_new) return Change::kNone;
  } else if (is_new || before.dtype != now.dtype) {
    return Change::kNotCompared;
  }
  if (before.fingerprint == now.fingerprint) return Change::kNone;
  // A remainder that was written belongs to the weight that it was written with.
  const bool with_remainder = split && before.master_version != now.master_version;
  return with_remainder ? Change::kNone : Change::kWritten;
}

void WeightVersions::compare(const RowTensors& row, const Row& memory) {
  Entry& entry = entries_[row.position];
  entry.change = has_master(row) ? change_between(entry, entry_of(row, memory), is_split(memory))
                                 : Change::kNone;
}

void WeightVersions::record(const RowTensors& row, const Row& memory) {
  if (has_master(row)) entries_[row.position] = entry_of(row, memory);
}

}  // namespace apex_mp::step

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

// Returns a hash of sampled elements, which are read on the CPU only.
uint64_t sample_of(const Row& memory, const Array& array, bool is_on_cpu) {
  uint64_t hash = 0;
  if (!is_on_cpu) return hash;
  constexpr int64_t kSamples = 8;
  const auto* halves = static_cast<const uint16_t*>(array.data);
  const int64_t step = std::max<int64_t>((memory.size + kSamples - 1) / kSamples, 1);
  uint64_t factor = 1;  // does not depend on what is read
  for (int64_t i = 0; i < memory.size; i += step, factor *= 0x10001u) hash += factor * halves[i];
  return hash;
}

}  // namespace

WeightVersions::Entry WeightVersions::entry_of(const RowTensors& row, const Row& memory) {
  const bool split = is_split(memory);
  const at::Tensor& master = split ? *row.copy : *row.param;
  const at::Tensor& weight = split ? *row.param : *row.copy;
  const Array& array = split ? memory.param : memory.copy;
  const bool is_on_cpu = weight.device().type() == at::kCPU;
  Entry entry = {master.unsafeGetTensorImpl(), version_of(master), array.dtype};
  entry.sample = sample_of(memory, array, is_on_cpu);
  // With a remainder nothing can be compared, so equal numbers that were written count as none.
  if (split && is_on_cpu) {
    entry.sample = 2 * entry.sample + (array.dtype == DType::kHalf ? 1 : 0);
  } else {
    entry.weight_version = version_of(weight);
    entry.address = array.data;
  }
  return entry;
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
  const bool is_known =
      before.weight_version != now.weight_version || before.address != now.address;
  if (!is_known && before.sample == now.sample) return Change::kNone;
  // A remainder that was written belongs to the weight that it was written with.
  if (split && before.master_version != now.master_version) return Change::kNone;
  return is_known ? Change::kWritten : Change::kHidden;
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

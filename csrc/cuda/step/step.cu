// StepTable: what the host writes to the device memory of the fused step, and whether it is still
// valid. run.cu has the launches.
#include "cuda/step/step.h"

#include <algorithm>
#include <stdexcept>

#include "cuda/step/memory.h"
#include "cuda/table.h"

namespace apex_mp::cuda {
namespace {

// Math is done in double if one of the arrays, other than the copy, holds doubles.
bool has_double_math(const step::Row& row) {
  const step::Array arrays[] = {row.param, row.grad, row.tensors[0], row.tensors[1]};
  return std::any_of(std::begin(arrays), std::end(arrays),
                     [](const step::Array& array) { return array.dtype == DType::kDouble; });
}

StepFacts facts_of(const step::Row& row) {
  const auto bits = [](const step::Array& array) { return static_cast<uint32_t>(array.dtype); };
  return {bits(row.param),      bits(row.grad),
          bits(row.copy),       bits(row.tensors[0]) | bits(row.tensors[1]) << kDTypeBits,
          has_double_math(row), row.scaled,
          row.writes_grad,      row.copy_counts};
}

int64_t chunk_size_of_rows(const std::vector<step::Row>& rows) {
  std::vector<int64_t> sizes;
  sizes.reserve(rows.size());
  for (const step::Row& row : rows) sizes.push_back(row.size);
  return chunk_size_of(sizes, kChunkLimits);
}

// Whether rows are equal except for the gradient's address. A missing gradient fits any row.
bool same_row(const step::Row& one, const step::Row& other) {
  return one.param == other.param && one.copy == other.copy &&
         one.copy_counts == other.copy_counts &&
         std::equal(one.tensors, std::end(one.tensors), other.tensors) &&
         std::equal(one.exponents, std::end(one.exponents), other.exponents) &&
         std::equal(one.numbers, std::end(one.numbers), other.numbers) && one.size == other.size &&
         one.group == other.group && one.position == other.position &&
         (other.grad.data == nullptr ||
          (one.grad.dtype == other.grad.dtype && one.scaled == other.scaled &&
           one.writes_grad == other.writes_grad));
}

}  // namespace

StepTable::StepTable(const step::Task& task)
    : rule_(task.rule),
      rows_(task.rows),
      groups_(task.groups),
      chunk_size_(chunk_size_of_rows(task.rows)) {
  int64_t chunks = 0;
  first_chunk_.reserve(rows_.size() + 1);
  for (const step::Row& row : rows_) {
    first_chunk_.push_back(static_cast<int32_t>(chunks));
    chunks += std::max<int64_t>(count_chunks(row.size, chunk_size_), 1);
    const DType state = row.tensors[0].dtype;
    (state == DType::kCode       ? has_coded_state_
     : state == DType::kBFloat16 ? has_narrow_state_
                                 : has_wide_state_) = true;
    if (chunks > INT32_MAX) throw std::length_error("apex_mp: too many parameters for one step");
  }
  first_chunk_.push_back(static_cast<int32_t>(chunks));
  const StepMemory from_zero = memory_at(nullptr);
  image_.resize(reinterpret_cast<uintptr_t>(from_zero.grads));
  bytes_ = reinterpret_cast<uintptr_t>(from_zero.group_outcomes + groups_.size());
  build_image();
}

void StepTable::build_image() {
  const StepMemory image = memory_at(image_.data());
  *image.control = {};
  std::copy(groups_.begin(), groups_.end(), image.groups);
  for (size_t group = 0; group < groups_.size(); ++group) image.group_chunks[group] = {0, 0};
  for (int32_t i = 0; i < image.counts.rows; ++i) {
    const step::Row& row = rows_[i];
    image.rows[i] = {row.param.data,
                     row.copy.data,
                     {row.tensors[0].data, row.tensors[1].data},
                     {row.exponents[0], row.exponents[1]},
                     {row.numbers[0], row.numbers[1]},
                     row.group,
                     first_chunk_[i],
                     row.position};
    StepGroupChunks& of_group = image.group_chunks[row.group];
    if (of_group.end == 0) of_group.begin = first_chunk_[i];
    of_group.end = first_chunk_[i + 1];
    for (int32_t chunk = first_chunk_[i]; chunk < first_chunk_[i + 1]; ++chunk) {
      const int32_t index = chunk - first_chunk_[i];
      const int64_t count = chunk_of(i, index, row.size, chunk_size_).count;
      image.chunks[chunk] = {i, index, static_cast<int32_t>(count), facts_of(row)};
    }
  }
}

bool StepTable::fits(const step::Task& task) const {
  return groups_.size() == task.groups.size() && rows_.size() == task.rows.size() &&
         std::equal(rows_.begin(), rows_.end(), task.rows.begin(), &same_row);
}

StepMemory StepTable::memory_at(const void* memory) const {
  const StepCounts counts = {static_cast<int32_t>(rows_.size()),
                             first_chunk_.back(),
                             static_cast<int32_t>(groups_.size()),
                             static_cast<int32_t>(chunk_size_),
                             rule_,
                             has_wide_state_,
                             has_narrow_state_,
                             has_coded_state_};
  return step_memory(reinterpret_cast<uintptr_t>(memory), counts);
}

int64_t StepTable::outcome_offset() const {
  return reinterpret_cast<uintptr_t>(memory_at(nullptr).outcome);
}

int64_t StepTable::outcome_bytes() const { return bytes_ - outcome_offset(); }

}  // namespace apex_mp::cuda

// The layout of a StepTable's device memory: sections of one block. The host fills the first ones,
// kernels write to the others. For step.cu and the passes.
#pragma once

#include <cstdint>

#include "cuda/step/step.h"
#include "math/rounding.h"

namespace apex_mp::cuda {

struct StepControl {
  unsigned int arrived;  // blocks of pass 1, see last_block.h
  int32_t found_inf;     // by blocks of pass 1; the last one clears it for the next step
};

// The chunks of a group, which lie together because rows are sorted by group.
struct StepGroupChunks {
  int32_t begin;
  int32_t end;
};

struct alignas(16) StepRow {
  void* param;
  void* copy;
  void* tensors[math::kMaxTensors];       // of state
  uint8_t* exponents[math::kMaxTensors];  // see step::Row
  float* numbers[math::kMaxNumbers];      // of state; nullptr: there is none
  int32_t group;
  int32_t first_chunk;
  int32_t position;  // see step::Row
};

constexpr uint32_t kDTypeBits = 3;
constexpr uint32_t kStateDTypeBits = kDTypeBits * math::kMaxTensors;

// A part of every chunk of a row, so that pass 1 need not read the row.
struct StepFacts {
  uint32_t param : kDTypeBits;
  uint32_t grad : kDTypeBits;
  uint32_t copy : kDTypeBits;
  uint32_t tensors : kStateDTypeBits;
  uint32_t double_math : 1;
  uint32_t scaled : 1;
  uint32_t writes_grad : 1;
  uint32_t copy_counts : 1;
};

// The work of one block, read by one load of 16 bytes, without a search. An empty row has a chunk
// without numbers, so that its steps are counted.
struct alignas(16) StepChunk {
  int32_t row;
  int32_t index;  // of the row's chunks; the block of number 0 looks after the row itself
  int32_t count;
  StepFacts facts;
};
static_assert(sizeof(StepChunk) == 16);

// The prepared numbers of a row: those of the rule, and how its state is rounded.
struct StepPrepared {
  double numbers[math::kMaxPrepared];
  math::Rounding rounding;
};

struct StepCounts {
  int32_t rows;
  int32_t chunks;
  int32_t groups;
  int32_t chunk_size;
  int32_t rule;  // number in math::AllRules
  bool has_wide_state;
  bool has_narrow_state;  // whether there are rows whose state is in bfloat16
  bool has_coded_state;   // or in one byte
};

struct StepMemory {
  StepCounts counts;
  StepControl* control;
  step::Group* groups;
  StepGroupChunks* group_chunks;
  StepRow* rows;
  StepChunk* chunks;
  // Kernels write to the sections from here on, whose initial content does not matter.
  const void** grads;      // of each row; nullptr: not stepped
  StepPrepared* prepared;  // of each row that is stepped
  math::SumSq* chunk_sums;
  double* chunk_maxima;      // of absolute values; only if the rule may ask for them
  math::Measured* measured;  // of each chunk; likewise
  math::SumSq* group_sums;
  StepOutcome* outcome;
  math::GroupOutcome* group_outcomes;
};

// Cuts sections off a block of memory; from address 0 on it only counts bytes.
class StepSections {
 public:
  explicit StepSections(uintptr_t begin) : next_(begin) {}

  template <typename T>
  T* take(int64_t count) {
    T* section = reinterpret_cast<T*>(next_);
    next_ += (count * sizeof(T) + 15) / 16 * 16;
    return section;
  }

 private:
  uintptr_t next_;
};

inline StepMemory step_memory(uintptr_t begin, const StepCounts& counts) {
  StepSections sections(begin);
  StepMemory memory;
  memory.counts = counts;
  memory.control = sections.take<StepControl>(1);
  memory.groups = sections.take<step::Group>(counts.groups);
  memory.group_chunks = sections.take<StepGroupChunks>(counts.groups);
  memory.rows = sections.take<StepRow>(counts.rows);
  memory.chunks = sections.take<StepChunk>(counts.chunks);
  memory.grads = sections.take<const void*>(counts.rows);
  memory.prepared = sections.take<StepPrepared>(counts.rows);
  memory.chunk_sums = sections.take<math::SumSq>(counts.chunks);
  const math::RuleFacts& rule = math::AllRules::facts(counts.rule);
  memory.chunk_maxima = sections.take<double>(rule.takes_norms ? counts.chunks : 0);
  memory.measured = sections.take<math::Measured>(rule.takes_ratio ? counts.chunks : 0);
  memory.group_sums = sections.take<math::SumSq>(counts.groups);
  memory.outcome = sections.take<StepOutcome>(1);
  memory.group_outcomes = sections.take<math::GroupOutcome>(counts.groups);
  return memory;
}

}  // namespace apex_mp::cuda

// The two passes of the fused step: the arguments of their kernels, and the functions that launch
// them. For run.cu, which calls those, and update.cu and check.cu, which have the kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/step/memory.h"
#include "cuda/table.h"

namespace apex_mp::cuda {

// How pass 1 decides after it has read the gradients; the same for all its launches.
struct StepDecision {
  bool check;  // inf and NaN in gradients stop the step
  bool sums;   // sums of squares are wanted
  bool clip_by_global_norm;
  step::Number scale;
  double clip_to;
  bool has_clip_norm;
  step::Number clip_norm;
  const float* found_inf;
  step::LossScale loss_scale;
};

// The arguments of one launch of pass 1. In CarryingCheck the data that it carries follow them.
struct alignas(16) StepCheck {
  StepMemory memory;
  StepDecision decision;
  int32_t first_chunk;  // the blocks of this launch take these chunks ...
  int32_t chunks;
  int32_t first_row;  // ... and look after these rows, whose gradients' addresses are carried
  int32_t rows;
  int32_t first_group;
  int32_t groups;           // whose options are carried
  unsigned int all_blocks;  // of all launches of this step

  __host__ __device__ const step::Group* carried_groups() const {
    return reinterpret_cast<const step::Group*>(this + 1);
  }
  __host__ __device__ const void* const* carried_grads() const {
    return reinterpret_cast<const void* const*>(carried_groups() + groups);
  }
  int64_t carried_bytes() const { return groups * sizeof(step::Group) + rows * sizeof(void*); }
};

// Data that may differ from step to step are carried by value: options of groups, then as many
// addresses of gradients as fit.
template <int kBytes>
struct CarryingCheck : StepCheck {
  alignas(16) char carried[kBytes];  // Not in the padding of StepCheck.
};
using FullCheck = CarryingCheck<kTableBytes>;
using FewCheck = CarryingCheck<kFewTableBytes>;
static_assert(sizeof(FullCheck) == sizeof(StepCheck) + kTableBytes);  // Nothing lies between.

inline int32_t rows_that_fit(int32_t groups) {
  return static_cast<int32_t>((kTableBytes - groups * sizeof(step::Group)) / sizeof(void*));
}

// The number of blocks of pass 1, for StepCheck::all_blocks: one for each chunk, or if no gradient
// is read, enough for the rows. At least one, which decides.
int32_t blocks_of(const StepCheck& check, bool reads_grads);

void launch_step_check(const FullCheck& check, bool reads_grads, cudaStream_t stream);

// The arguments of pass 2, whose blocks take the chunks before `end_chunk`, the last one first.
struct StepUpdate {
  StepMemory memory;
  int32_t end_chunk;
};

void launch_step_update(const StepMemory& memory, cudaStream_t stream);

}  // namespace apex_mp::cuda

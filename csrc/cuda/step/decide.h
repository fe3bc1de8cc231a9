// The work of the last block of pass 1: it adds the sums of chunks and decides what pass 2 does.
// For check.cu, and for update.cu, which reads the decision.
#pragma once

#include "cuda/reduce.h"
#include "cuda/step/passes.h"
#include "cuda/vectors.h"

namespace apex_mp::cuda {

// A group of more chunks is summed by the whole block, one of fewer by a warp: so thousands of
// small groups take as little time as one of 1e9 numbers. The order depends on sizes alone.
constexpr int32_t kChunksForWarp = 1024;

__device__ inline math::SumSq sum_chunks(const math::SumSq* sums, const StepGroupChunks& chunks,
                                         int thread, int threads) {
  math::SumSq total = {0.0, 0.0};
#pragma unroll 4
  for (int64_t chunk = chunks.begin + thread; chunk < chunks.end; chunk += threads) {
    const double2 both = __ldcg(reinterpret_cast<const double2*>(sums + chunk));
    total.scaled += both.x;
    total.plain += both.y;
  }
  return total;
}

// Called by all threads of the block, with a barrier before and after.
__device__ inline void sum_groups(const StepMemory& memory) {
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t group = warp; group < memory.counts.groups; group += kBlockSize / kWarpSize) {
    const StepGroupChunks chunks = memory.group_chunks[group];
    if (chunks.end - chunks.begin > kChunksForWarp) continue;
    math::SumSq sum = sum_chunks(memory.chunk_sums, chunks, lane, kWarpSize);
    sum = {warp_sum(sum.scaled), warp_sum(sum.plain)};
    if (lane == 0) memory.group_sums[group] = sum;
  }
  for (int32_t group = 0; group < memory.counts.groups; ++group) {
    const StepGroupChunks chunks = memory.group_chunks[group];
    if (chunks.end - chunks.begin <= kChunksForWarp) continue;
    math::SumSq sum = sum_chunks(memory.chunk_sums, chunks, threadIdx.x, kBlockSize);
    sum.scaled = block_sum(sum.scaled);
    __syncthreads();
    sum.plain = block_sum(sum.plain);
    if (threadIdx.x == 0) memory.group_sums[group] = sum;
    __syncthreads();
  }
}

// If this launch carries the group, it is read from the arguments: its copy in memory is being
// written.
__device__ inline const step::Group& group_of(const StepCheck& check, int32_t group) {
  const int32_t carried = group - check.first_group;
  if (carried < 0 || carried >= check.groups) return check.memory.groups[group];
  return check.carried_groups()[carried];
}

// The chunk after the row's last one.
__device__ inline int32_t end_of_row(const StepMemory& memory, int64_t row) {
  return row + 1 < memory.counts.rows ? memory.rows[row + 1].first_chunk : memory.counts.chunks;
}

// Prepares the numbers of a row from those of its state before the step.
template <typename Rule>
__device__ void prepare(const StepMemory& memory, const step::Group& group, int32_t row, int which,
                        const math::Norms& norms) {
  const StepRow& facts = memory.rows[row];
  float numbers[math::kMaxNumbers] = {};
#pragma unroll
  for (int i = 0; i < Rule::kNumbers; ++i) {
    if (facts.numbers[i] != nullptr) numbers[i] = *global(facts.numbers[i]);
  }
  memory.prepared[row].numbers[which] = Rule::prepare(which, group.options, numbers, norms);
}

__device__ inline math::ClipRule clip_rule(const StepCheck& check, int32_t group) {
  const step::Group& options = group_of(check, group);
  return {options.max_norm, options.maximize, options.has_norm,
          options.has_norm ? value_of(options.norm) : 0.0};
}

// Numbers over all groups. They lie in shared memory: as many in registers would spill.
struct Totals {
  math::SumSq sums;
  double loss_scale;
  double norm;   // unscaled, before clipping
  double scale;  // what scaled gradients are divided by
};

__device__ inline math::SumSq sums_of(const StepCheck& check, int32_t group) {  // NaN: not summed.
  return check.decision.sums ? check.memory.group_sums[group] : math::SumSq{NAN, NAN};
}

// Called by one thread.
__device__ inline void add_up_groups(const StepCheck& check, Totals& totals) {
  const StepDecision& decision = check.decision;
  math::SumSq all = {0.0, 0.0};
  for (int32_t group = 0; group < check.memory.counts.groups; ++group) {
    const math::SumSq sum = sums_of(check, group);
    all = {all.scaled + sum.scaled, all.plain + sum.plain};
  }
  totals.sums = all;
  totals.loss_scale = value_of(decision.scale);
  totals.norm = math::unscaled_norm(all, totals.loss_scale);
  totals.scale = math::clipped_scale(
      totals.loss_scale, decision.has_clip_norm ? value_of(decision.clip_norm) : totals.norm,
      decision.clip_to);
}

// Each thread decides on some groups.
__device__ inline void decide_on_groups(const StepCheck& check, const Totals& totals) {
  const StepMemory& memory = check.memory;
  for (int32_t group = threadIdx.x; group < memory.counts.groups; group += kBlockSize) {
    const math::SumSq own = sums_of(check, group);
    math::SumSq clipped = own;
    if (check.decision.clip_by_global_norm) clipped = totals.sums;
    memory.group_outcomes[group] =
        math::group_outcome(clip_rule(check, group), own, clipped, totals.loss_scale, totals.scale);
  }
}

// Returns the norm of the row's gradient before unscaling, in lane 0. Called by all lanes of a
// warp.
template <typename Rule>
__device__ double norm_of_chunks(const StepCheck& check, const StepRow& row, int32_t end,
                                 int lane) {
  const StepMemory& memory = check.memory;
  if (Rule::wants_max(group_of(check, row.group).options)) {
    double most = 0.0;
    for (int32_t chunk = row.first_chunk + lane; chunk < end; chunk += kWarpSize) {
      most = fmax(most, __ldcg(memory.chunk_maxima + chunk));
    }
    return warp_reduce(most, Max());
  }
  const math::SumSq sums = sum_chunks(memory.chunk_sums, {row.first_chunk, end}, lane, kWarpSize);
  return sqrt(warp_sum(sums.scaled + sums.plain));  // One of the two is 0.
}

// A warp for each row. Called by all threads, after the decision on groups.
template <typename Rule>
__device__ void prepare_by_norms(const StepCheck& check) {
  const StepMemory& memory = check.memory;
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t row = threadIdx.x / kWarpSize; row < memory.counts.rows;
       row += kBlockSize / kWarpSize) {
    const StepRow& facts = memory.rows[row];
    const double norm = norm_of_chunks<Rule>(check, facts, end_of_row(memory, row), lane);
    if (lane != 0) continue;
    const math::GroupOutcome& grads = memory.group_outcomes[facts.group];
    const bool scaled = memory.chunks[facts.first_chunk].facts.scaled;
    const double factor = scaled ? grads.scaled_factor : grads.plain_factor;
    prepare<Rule>(memory, group_of(check, facts.group), static_cast<int32_t>(row), Rule::kNorm,
                  {norm * fabs(factor), 0.0, 0.0});
  }
}

// Called by one thread, when the scale of this step is no longer needed.
__device__ inline math::LossScaleState next_loss_scale(const step::LossScale& loss_scale,
                                                       bool found_inf) {
  if (loss_scale.state == nullptr) return {0.0f, 0, 0};
  return *loss_scale.state = math::update_scale(*loss_scale.state, found_inf, loss_scale.rule);
}

// Returns the first row from `begin` on whose sums are inf or NaN; INT32_MAX if there is none.
// Called by all threads.
static __device__ inline int32_t find_nonfinite_row(const StepMemory& memory, int32_t begin) {
  __shared__ int32_t first;
  __syncthreads();
  if (threadIdx.x == 0) first = INT32_MAX;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < memory.counts.chunks; i += kBlockSize) {
    const int32_t row = memory.chunks[i].row;
    const double2 sum = __ldcg(reinterpret_cast<const double2*>(memory.chunk_sums + i));
    if (row < begin || !math::not_finite(sum.x + sum.y)) continue;
    atomicMin(&first, row);
    break;  // Chunks are in the order of rows.
  }
  __syncthreads();
  return first;
}

// Returns how many of the rows before this one have a gradient. Called by all threads.
static __device__ inline int32_t number_with_grad(const StepMemory& memory, int32_t row) {
  __shared__ int32_t count;
  __syncthreads();
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int32_t i = threadIdx.x; i < row; i += kBlockSize) {
    if (__ldcg(reinterpret_cast<const unsigned long long*>(memory.grads + i)) != 0)
      atomicAdd(&count, 1);
  }
  __syncthreads();
  return count;
}

// Rare, so not optimized. Called by all threads.
__device__ inline void name_nonfinite_rows(const StepMemory& memory) {
  int32_t begin = 0;
  for (int i = 0; i < kRowsNamed; ++i) {
    const int32_t row = find_nonfinite_row(memory, begin);
    if (row == INT32_MAX) return;
    const int32_t number = number_with_grad(memory, row);
    if (threadIdx.x == 0) memory.outcome->nonfinite_rows[i] = number;
    begin = row + 1;
  }
}

// Called by all threads of the last block, after the sums of groups.
static __device__ inline void decide(const StepCheck& check) {
  __shared__ Totals totals;
  const StepDecision& decision = check.decision;
  StepControl& control = *check.memory.control;
  const bool known = decision.found_inf != nullptr && *decision.found_inf != 0.0f;
  const bool found_inf = known || __ldcg(&control.found_inf) != 0;
  if (threadIdx.x == 0) add_up_groups(check, totals);
  __syncthreads();
  decide_on_groups(check, totals);
  __syncthreads();
  if (threadIdx.x == 0) {
    control.found_inf = 0;
    StepOutcome& outcome = *check.memory.outcome;
    outcome = {found_inf ? 1.0f : 0.0f,
               next_loss_scale(decision.loss_scale, found_inf),
               totals.scale,
               totals.norm,
               {}};
    for (int32_t& row : outcome.nonfinite_rows) row = -1;
  }
  if (found_inf && decision.sums) name_nonfinite_rows(check.memory);
  math::AllRules::with(check.memory.counts.rule, [&](auto rule) {
    using Rule = decltype(rule);
    if constexpr (Rule::kNorm >= 0) prepare_by_norms<Rule>(check);
  });
}

}  // namespace apex_mp::cuda

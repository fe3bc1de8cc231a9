// Pass 2 of the fused step: unscales, clips, steps and copies out, or does nothing if pass 1 has
// found inf or NaN. Before it, if the rule asks for the norms of parameters and updates, a pass
// that measures them.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/loops.h"
#include "cuda/reduce.h"
#include "cuda/step/codes.h"
#include "cuda/step/decide.h"
#include "cuda/step/passes.h"
#include "math/step_scalars.h"

namespace apex_mp::cuda {
namespace {

constexpr Cache kStateCache = APEX_MP_STREAM_STATE ? Cache::kStreamed : Cache::kKept;

// Called by one thread. Reads the rule's prepared numbers from rows, the rest from groups.
template <typename Rule>
__device__ auto factors_of(const StepMemory& memory, const StepChunk& chunk) {
  const int32_t group = memory.rows[chunk.row].group;
  const step::Group& options = memory.groups[group];
  const math::GroupOutcome& outcome = memory.group_outcomes[group];
  return Rule::factors(options.options, value_of(options.lr), memory.prepared[chunk.row].numbers,
                       chunk.facts.scaled ? outcome.scaled_factor : outcome.plain_factor);
}

// Called by one thread of the row's first block; pass 2 reads these numbers nowhere else.
template <typename Rule>
__device__ void advance_numbers(const StepRow& row, const StepPrepared& prepared) {
  float before[math::kMaxNumbers] = {};
#pragma unroll
  for (int i = 0; i < Rule::kNumbers; ++i) {
    if (row.numbers[i] != nullptr) before[i] = *global(row.numbers[i]);
  }
#pragma unroll
  for (int i = 0; i < Rule::kNumbers; ++i) {
    if (row.numbers[i] == nullptr) continue;
    *global(row.numbers[i]) = Rule::advance(i, before, prepared.numbers);
  }
}

__device__ Array at_chunk(const void* data, uint32_t dtype_bits, int64_t first) {
  const auto dtype = static_cast<DType>(dtype_bits);
  char* begin = static_cast<char*>(const_cast<void*>(data));
  return {begin == nullptr ? nullptr : begin + first * size_of(dtype), dtype};
}

constexpr uint32_t kDTypeMask = (1u << kDTypeBits) - 1u;

template <typename Rule>
__device__ PartOf<Rule> part_of(const StepRow& row, const void* grad, const StepChunk& chunk,
                                int32_t chunk_size) {
  const int64_t first = int64_t{chunk.index} * chunk_size;
  const StepFacts& facts = chunk.facts;
  PartOf<Rule> part;
  part.arrays[0] = at_chunk(row.param, facts.param, first);
  part.arrays[1] = at_chunk(grad, facts.grad, first);
  part.arrays[2] = at_chunk(row.copy, facts.copy, first);
#pragma unroll
  for (int i = 0; i < Rule::kTensors; ++i) {
    part.arrays[3 + i] =
        at_chunk(row.tensors[i], facts.tensors >> kDTypeBits * i & kDTypeMask, first);
  }
  part.count = chunk.count;
  part.double_math = facts.double_math;
  part.copy_counts = facts.copy_counts;
  part.head = head_of(part);
  return part;
}

// A kernel is compiled for rows whose state is in bfloat16, one for codes, and one for the others:
// a branch for every vector would cost registers. Math is done in double where a row has doubles.
template <DType state>
__device__ bool is_of(const StepFacts& facts) {
  constexpr uint32_t kNarrow = 3u & static_cast<uint32_t>(DType::kBFloat16);
  static_assert((3u & static_cast<uint32_t>(DType::kCode)) == kNarrow);
  if (state == DType::kFloat) return (facts.tensors & 3u) != kNarrow;
  return (facts.tensors & kDTypeMask) == static_cast<uint32_t>(state);
}

// Computes the same update as step_kernel(), but writes only sums of squares for each chunk.
template <typename Rule, DType state>
__global__ void __launch_bounds__(kBlockSize, APEX_MP_BLOCKS)
    measure_kernel(const __grid_constant__ StepUpdate update) {
  const StepMemory& memory = update.memory;
  const int32_t index = update.end_chunk - 1 - static_cast<int32_t>(blockIdx.x);
  const StepChunk chunk = memory.chunks[index];
  const void* grad = memory.grads[chunk.row];
  if (grad == nullptr || memory.outcome->found_inf != 0.0f || !is_of<state>(chunk.facts)) return;
  __shared__ typename Rule::template Factors<double> factors;
  if (threadIdx.x == 0) factors = factors_of<Rule>(memory, chunk);
  __syncthreads();
  PartOf<Rule> part = part_of<Rule>(memory.rows[chunk.row], grad, chunk, memory.counts.chunk_size);
  math::Measured sums;
  if (part.double_math) {
    sums = measure_numbers<Rule, double>(part, factors);
  } else {
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) part.arrays[3 + i].dtype = state;
    sums = measure_numbers<Rule, float>(part, math::factors_as<float>(factors));
  }
  sums.param = block_sum(sums.param);
  __syncthreads();
  sums.update = block_sum(sums.update);
  if (threadIdx.x == 0) memory.measured[index] = sums;
}

// A block for each row sums what was measured, in an order that depends on sizes alone.
template <typename Rule>
__global__ void __launch_bounds__(kBlockSize)
    ratio_kernel(const __grid_constant__ StepMemory memory) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  if (memory.grads[row] == nullptr || memory.outcome->found_inf != 0.0f) return;
  math::Measured sums = {0.0, 0.0};
  for (int64_t i = memory.rows[row].first_chunk + threadIdx.x; i < end_of_row(memory, row);
       i += kBlockSize) {
    sums.param += memory.measured[i].param;
    sums.update += memory.measured[i].update;
  }
  sums.param = block_sum(sums.param);
  __syncthreads();
  sums.update = block_sum(sums.update);
  if (threadIdx.x != 0) return;
  prepare<Rule>(memory, memory.groups[memory.rows[row].group], row, Rule::kRatio,
                {0.0, sqrt(sums.param), sqrt(sums.update)});
}

// Backwards, because the gradients that pass 1 read last are still in the second-level cache.
template <typename Rule, DType state>
__global__ void __launch_bounds__(kBlockSize, APEX_MP_BLOCKS)
    step_kernel(const __grid_constant__ StepUpdate update) {
  const StepMemory& memory = update.memory;
  if (memory.outcome->found_inf != 0.0f) return;
  const StepChunk chunk = memory.chunks[update.end_chunk - 1 - static_cast<int32_t>(blockIdx.x)];
  const void* grad = memory.grads[chunk.row];
  if (grad == nullptr || !is_of<state>(chunk.facts)) return;
  const StepRow row = memory.rows[chunk.row];
  __shared__ typename Rule::template Factors<double> factors;
  __shared__ double inv_scale;
  if (threadIdx.x == 0) {
    factors = factors_of<Rule>(memory, chunk);
    inv_scale = 1.0 / memory.outcome->scale;
    if constexpr (Rule::kNumbers > 0) {
      if (chunk.index == 0) advance_numbers<Rule>(row, memory.prepared[chunk.row]);
    }
  }
  __syncthreads();
  PartOf<Rule> part = part_of<Rule>(row, grad, chunk, memory.counts.chunk_size);
  const Array unscaled =
      chunk.facts.writes_grad ? part.arrays[1] : Array{nullptr, part.arrays[1].dtype};
  const StateRounding rounding = {
      memory.prepared[chunk.row].rounding,
      static_cast<uint32_t>(int64_t{chunk.index} * memory.counts.chunk_size)};
  if (part.double_math) {
    step_numbers<Rule, kStateCache, double>(part, factors,
                                            unscaled_grad<double>(unscaled, inv_scale), rounding);
  } else {
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) part.arrays[3 + i].dtype = state;
    step_numbers<Rule, kStateCache, float>(part, math::factors_as<float>(factors),
                                           unscaled_grad<float>(unscaled, inv_scale), rounding);
  }
}

// The same for moments of one byte.
template <typename Rule>
__global__ void __launch_bounds__(kBlockSize, APEX_MP_BLOCKS)
    codes_kernel(const __grid_constant__ StepUpdate update) {
  const StepMemory& memory = update.memory;
  if (memory.outcome->found_inf != 0.0f) return;
  const StepChunk chunk = memory.chunks[update.end_chunk - 1 - static_cast<int32_t>(blockIdx.x)];
  const void* grad = memory.grads[chunk.row];
  if (grad == nullptr || !is_of<DType::kCode>(chunk.facts)) return;
  const StepRow row = memory.rows[chunk.row];
  __shared__ typename Rule::template Factors<double> factors;
  __shared__ double inv_scale;
  if (threadIdx.x == 0) {
    factors = factors_of<Rule>(memory, chunk);
    inv_scale = 1.0 / memory.outcome->scale;
    if (chunk.index == 0) advance_numbers<Rule>(row, memory.prepared[chunk.row]);
  }
  __syncthreads();
  StepRow without_state = row;
#pragma unroll
  for (void*& tensor : without_state.tensors) tensor = nullptr;
  const PartOf<Rule> part = part_of<Rule>(without_state, grad, chunk, memory.counts.chunk_size);
  const Array unscaled =
      chunk.facts.writes_grad ? part.arrays[1] : Array{nullptr, part.arrays[1].dtype};
  const int64_t first = int64_t{chunk.index} * memory.counts.chunk_size;
  const StateRounding rounding = {memory.prepared[chunk.row].rounding,
                                  static_cast<uint32_t>(first)};
  if (part.double_math) {
    step_codes<Rule, kStateCache, double>(part, row, first, factors,
                                          unscaled_grad<double>(unscaled, inv_scale), rounding);
  } else {
    step_codes<Rule, kStateCache, float>(part, row, first, math::factors_as<float>(factors),
                                         unscaled_grad<float>(unscaled, inv_scale), rounding);
  }
}

}  // namespace

void launch_step_update(const StepMemory& memory, cudaStream_t stream) {
  const auto launch_one = [&](auto kernel, bool has_rows) {
    if (!has_rows) return;
    for (int64_t end = memory.counts.chunks; end > 0; end -= kMaxBlocks) {
      launch(kernel, std::min(end, kMaxBlocks), stream,
             StepUpdate{memory, static_cast<int32_t>(end)});
    }
  };
  math::AllRules::with(memory.counts.rule, [&](auto rule) {
    using Rule = decltype(rule);
    if constexpr (Rule::kRatio >= 0) {
      launch_one(measure_kernel<Rule, DType::kFloat>, memory.counts.has_wide_state);
      launch_one(measure_kernel<Rule, DType::kBFloat16>, memory.counts.has_narrow_state);
      launch(ratio_kernel<Rule>, memory.counts.rows, stream, memory);
    }
    launch_one(step_kernel<Rule, DType::kFloat>, memory.counts.has_wide_state);
    launch_one(step_kernel<Rule, DType::kBFloat16>, memory.counts.has_narrow_state);
    if constexpr (Rule::kTakesCodes) {
      launch_one(codes_kernel<Rule>, memory.counts.has_coded_state);
    }
  });
}

}  // namespace apex_mp::cuda

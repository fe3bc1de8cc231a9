// Pass 2 of the fused step: unscales, clips, steps and copies out, or does nothing if pass 1 has
// found inf or NaN.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/loops.h"
#include "cuda/step_passes.h"
#include "math/step_scalars.h"

namespace apex_mp::cuda {
namespace {

constexpr Cache kStateCache = APEX_MP_STREAM_STATE ? Cache::kStreamed : Cache::kKept;

// By one thread. Lengths of steps come from groups, bias corrections from rows.
__device__ math::AdamFactors<double> factors_of(const StepMemory& memory, const StepChunk& chunk) {
  const int32_t group = memory.rows[chunk.row].group;
  const step::Group& options = memory.groups[group];
  const StepCorrections& corrections = memory.corrections[chunk.row];
  const math::GroupOutcome& outcome = memory.group_outcomes[group];
  return math::adam_factors(options.adam, value_of(options.lr), corrections.of_beta[0],
                            corrections.of_beta[1],
                            chunk.facts.scaled ? outcome.scaled_factor : outcome.plain_factor);
}

__device__ Array at_chunk(const void* data, uint32_t dtype_bits, int64_t first) {
  const auto dtype = static_cast<DType>(dtype_bits);
  char* begin = static_cast<char*>(const_cast<void*>(data));
  return {begin == nullptr ? nullptr : begin + first * size_of(dtype), dtype};
}

__device__ Part<5> part_of(const StepRow& row, const void* grad, const StepChunk& chunk,
                           int32_t chunk_size) {
  const int64_t first = int64_t{chunk.index} * chunk_size;
  const StepFacts& facts = chunk.facts;
  Part<5> part;
  part.arrays[0] = at_chunk(row.param, facts.param, first);
  part.arrays[1] = at_chunk(grad, facts.grad, first);
  part.arrays[2] = at_chunk(row.exp_avg, facts.exp_avg, first);
  part.arrays[3] = at_chunk(row.exp_avg_sq, facts.exp_avg_sq, first);
  part.arrays[4] = at_chunk(row.copy, facts.copy, first);
  part.count = chunk.count;
  part.double_math = facts.double_math;
  part.head = head_of(part);
  return part;
}

// Backwards: the gradients that pass 1 has read last are still in the second-level cache.
__global__ void __launch_bounds__(kBlockSize, APEX_MP_BLOCKS)
    step_kernel(const __grid_constant__ StepAdam adam) {
  const StepMemory& memory = adam.memory;
  if (memory.outcome->found_inf != 0.0f) return;
  const StepChunk chunk = memory.chunks[adam.end_chunk - 1 - static_cast<int32_t>(blockIdx.x)];
  const void* grad = memory.grads[chunk.row];
  if (grad == nullptr) return;
  const StepRow row = memory.rows[chunk.row];
  __shared__ math::AdamFactors<double> factors;
  __shared__ double inv_scale;
  if (threadIdx.x == 0) {
    factors = factors_of(memory, chunk);
    inv_scale = 1.0 / memory.outcome->scale;
    if (chunk.index == 0) *global(row.step) += 1.0f;  // Pass 2 does not read it anywhere else.
  }
  __syncthreads();
  Part<5> part = part_of(row, grad, chunk, memory.counts.chunk_size);
  const Array unscaled =
      chunk.facts.writes_grad ? part.arrays[1] : Array{nullptr, part.arrays[1].dtype};
  if (part.double_math) {
    adam_numbers<kStateCache>(part, factors, unscaled_grad<double>(unscaled, inv_scale));
  } else {
    // Moments are floats here: saying so spares a branch for every vector.
    part.arrays[2].dtype = part.arrays[3].dtype = DType::kFloat;
    adam_numbers<kStateCache>(part, math::narrow(factors),
                              unscaled_grad<float>(unscaled, inv_scale));
  }
}

}  // namespace

void launch_step_adam(const StepMemory& memory, cudaStream_t stream) {
  for (int64_t end = memory.counts.chunks; end > 0; end -= kMaxBlocks) {
    launch(step_kernel, std::min(end, kMaxBlocks), stream,
           StepAdam{memory, static_cast<int32_t>(end)});
  }
}

}  // namespace apex_mp::cuda

// adam_ on CUDA: a small kernel that counts steps and prepares each tensor's factors, then one pass
// over parameters, moments and gradients. Neither does anything when found_inf is set.
#include "math/adam.h"

#include "cuda/launch.h"
#include "cuda/loops.h"
#include "cuda/table.h"

namespace apex_mp::cuda {
namespace {

__device__ bool is_skipped(const Adam& task) {
  return task.found_inf != nullptr && *task.found_inf != 0.0f;
}

// One thread for each tensor: the powers of beta are expensive in double, and shared by a whole
// tensor.
__global__ void __launch_bounds__(kBlockSize)
    prepare_kernel(const __grid_constant__ FloatTable table, const Adam task) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kBlockSize + threadIdx.x;
  if (slot >= table.tensors || is_skipped(task)) return;
  const float step = *table.floats[slot] + 1.0f;
  *table.floats[slot] = step;
  task.factors[table.first_tensor + slot] =
      math::adam_factors(task.options, value_of(task.lr), step, value_of(task.inv_scale));
}

__global__ void __launch_bounds__(kBlockSize, APEX_MP_BLOCKS)
    adam_kernel(const __grid_constant__ Table<5> table, const Adam task) {
  if (is_skipped(task)) return;
  PartOf<math::Adam> part = part_of_block(table);
  const math::AdamFactors<double>& factors = task.factors[table.launch.first_tensor + part.slot];
  if (part.double_math) {
    step_numbers<math::Adam, Cache::kKept, double>(part, factors, UnscaledGrad<double>{});
  } else {
    // The checks ask for float moments here: saying so spares a branch for every vector.
    part.arrays[3].dtype = part.arrays[4].dtype = DType::kFloat;
    step_numbers<math::Adam, Cache::kKept, float>(part, math::factors_as<float>(factors),
                                                  UnscaledGrad<float>{});
  }
}

}  // namespace

void adam(const std::vector<Row<5>>& rows, const std::vector<float*>& steps, const Adam& task,
          cudaStream_t stream) {
  for_each_float_table(steps, [&](const FloatTable& table) {
    launch(prepare_kernel, count_chunks(table.tensors, kBlockSize), stream, table, task);
  });
  for_each_table(rows, kChunkLimits, [&](const Table<5>& rows_of_launch) {
    launch(adam_kernel, rows_of_launch.launch.chunks, stream, rows_of_launch, task);
  });
}

}  // namespace apex_mp::cuda

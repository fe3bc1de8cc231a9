// sgd_ on CUDA: one pass over parameters, momentum buffers and gradients; before it a small kernel
// that sees which buffers hold nothing yet, if any may. Neither does anything when found_inf is
// set.
#include "math/sgd.h"

#include "cuda/launch.h"
#include "cuda/loops.h"
#include "cuda/table.h"

namespace apex_mp::cuda {
namespace {

__device__ bool is_skipped(const Sgd& task) {
  return task.found_inf != nullptr && *task.found_inf != 0.0f;
}

// A kernel of its own: blocks of the next one share a tensor, and none of them may clear its flag
// before the others have read it.
__global__ void __launch_bounds__(kBlockSize)
    take_fresh_kernel(const __grid_constant__ FloatTable table, const Sgd task) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kBlockSize + threadIdx.x;
  if (slot >= table.tensors || is_skipped(task)) return;
  task.is_fresh[table.first_tensor + slot] = *table.floats[slot] != 0.0f;
  *table.floats[slot] = 0.0f;
}

__global__ void __launch_bounds__(kBlockSize, APEX_MP_BLOCKS)
    sgd_kernel(const __grid_constant__ Table<4> table, const Sgd task) {
  if (is_skipped(task)) return;
  const PartOf<math::Sgd> part = part_of_block(table);
  const bool is_fresh =
      task.is_fresh != nullptr && task.is_fresh[table.launch.first_tensor + part.slot];
  const math::SgdFactors<double> factors =
      math::sgd_factors(task.options, value_of(task.lr), value_of(task.inv_scale), is_fresh);
  if (part.double_math) {
    step_numbers<math::Sgd, Cache::kKept, double>(part, factors, UnscaledGrad<double>{});
  } else {
    step_numbers<math::Sgd, Cache::kKept, float>(part, math::factors_as<float>(factors),
                                                 UnscaledGrad<float>{});
  }
}

}  // namespace

void sgd(const std::vector<Row<4>>& rows, const std::vector<float*>& fresh, const Sgd& task,
         cudaStream_t stream) {
  for_each_float_table(fresh, [&](const FloatTable& table) {
    launch(take_fresh_kernel, count_chunks(table.tensors, kBlockSize), stream, table, task);
  });
  for_each_table(rows, kChunkLimits, [&](const Table<4>& table) {
    launch(sgd_kernel, table.launch.chunks, stream, table, task);
  });
}

}  // namespace apex_mp::cuda

// unscale_ and axpby_ on CUDA: new gradients from scaled or stashed ones, with the finite test.
#include "math/unscale.h"

#include "cuda/launch.h"
#include "cuda/loops.h"
#include "cuda/reduce.h"
#include "cuda/table.h"
#include "cuda/vectors.h"
#include "math/axpby.h"

namespace apex_mp::cuda {
namespace {

// Returns this thread's share of the sum of squares of what it has written, or 0 if not kSums.
template <bool kSums, typename opmath_t>
__device__ double unscale_part(const Part<2>& part, opmath_t inv_scale, int32_t& found_inf) {
  double sum_sq = 0.0;
  walk<opmath_t>(part, [&](int index, auto span) {
    opmath_t numbers[span];
    read(part.arrays[0], index, span, numbers);
#pragma unroll
    for (opmath_t& number : numbers) number = math::unscale(number, inv_scale, found_inf);
    store(numbers, part.arrays[1], index, span);
    if constexpr (kSums) {
      round_as_stored(part.arrays[1].dtype, numbers);
      sum_sq += static_cast<double>(sum_sq_of(numbers));
    }
  });
  return sum_sq;
}

template <bool kSums>
__device__ double unscale_part(const Part<2>& part, const Unscale& task) {
  const double inv_scale = value_of(task.inv_scale);
  int32_t found_inf = 0;
  const double sum_sq =
      part.double_math ? unscale_part<kSums, double>(part, inv_scale, found_inf)
                       : unscale_part<kSums, float>(part, static_cast<float>(inv_scale), found_inf);
  if (found_inf) *task.found_inf = 1.0f;  // All writers store the same value.
  return sum_sq;
}

__global__ void __launch_bounds__(kBlockSize)
    unscale_kernel(const __grid_constant__ Table<2> table, const Unscale task) {
  unscale_part<false>(part_of_block(table), task);
}

__global__ void __launch_bounds__(kBlockSize)
    unscale_and_sum_kernel(const __grid_constant__ Table<2> table, const Unscale task) {
  const double sum_sq = block_sum(unscale_part<true>(part_of_block(table), task));
  if (threadIdx.x == 0) task.chunk_sums[table.launch.first_chunk + blockIdx.x] = sum_sq;
}

template <typename opmath_t>
__device__ int32_t axpby_part(const Part<3>& part, const math::Axpby<opmath_t>& factors) {
  int32_t found_inf = 0;
  walk<opmath_t>(part, [&](int index, auto span) {
    const auto raw_x = load<opmath_t>(part.arrays[0], index, span);
    const auto raw_y = load<opmath_t>(part.arrays[1], index, span);
    opmath_t x[span];
    opmath_t y[span];
    widen(raw_x, part.arrays[0].dtype, x);
    widen(raw_y, part.arrays[1].dtype, y);
#pragma unroll
    for (int i = 0; i < span; ++i) x[i] = math::axpby(x[i], y[i], factors, found_inf);
    store(x, part.arrays[2], index, span);
  });
  return found_inf;
}

__global__ void __launch_bounds__(kBlockSize)
    axpby_kernel(const __grid_constant__ Table<3> table, const AxpbyTask task) {
  const Part<3> part = part_of_block(table);
  const math::Axpby<double> wide = {value_of(task.a), value_of(task.b), task.check_x, task.check_y};
  const math::Axpby<float> narrow = {static_cast<float>(wide.a), static_cast<float>(wide.b),
                                     wide.check_x, wide.check_y};
  const int32_t found_inf = part.double_math ? axpby_part(part, wide) : axpby_part(part, narrow);
  if (found_inf) *task.found_inf = 1.0f;
}

}  // namespace

void unscale(const std::vector<Row<2>>& rows, const Unscale& task, cudaStream_t stream) {
  const bool sums = task.chunk_sums != nullptr;
  for_each_table(rows, sums ? kSumLimits : kChunkLimits, [&](const Table<2>& table) {
    launch(sums ? unscale_and_sum_kernel : unscale_kernel, table.launch.chunks, stream, table,
           task);
  });
}

void axpby(const std::vector<Row<3>>& rows, const AxpbyTask& task, cudaStream_t stream) {
  for_each_table(rows, kChunkLimits, [&](const Table<3>& table) {
    launch(axpby_kernel, table.launch.chunks, stream, table, task);
  });
}

}  // namespace apex_mp::cuda

// Masters and their two parts (math/split.h), outside of steps.
#include "cuda/launch.h"
#include "cuda/table.h"
#include "cuda/vectors.h"

namespace apex_mp::cuda {
namespace {

__global__ void __launch_bounds__(kBlockSize) join_kernel(const __grid_constant__ Table<3> table) {
  const Part<3> part = part_of_block(table);
  const Array& weights = part.arrays[0];
  const Array& kept = part.arrays[1];
  const Array& masters = part.arrays[2];
  walk<float>(part, [&](int index, auto span) {
    const auto raw_weights = load<float>(weights, index, span);
    const auto raw_kept = load<float>(kept, index, span);
    float numbers[span];
    if (kept.dtype == DType::kRemainder) {
      widen(raw_weights, weights.dtype, numbers);
      join_masters(raw_kept, weights.dtype, numbers);
    } else {
      widen(raw_kept, kept.dtype, numbers);
      hold_masters(raw_weights, weights.dtype, numbers);
    }
    store(numbers, masters, index, span);
  });
}

__global__ void __launch_bounds__(kBlockSize) split_kernel(const __grid_constant__ Table<3> table) {
  const Part<3> part = part_of_block(table);
  const Array& weights = part.arrays[0];
  const Array& remainders = part.arrays[1];
  const Array& masters = part.arrays[2];
  walk<float>(part, [&](int index, auto span) {
    float numbers[span];
    read(masters, index, span, numbers);
    store_split<Cache::kKept>(numbers, weights, remainders, index, span);
  });
}

}  // namespace

void join_masters(const std::vector<Row<3>>& rows, cudaStream_t stream) {
  for_each_table(rows, kChunkLimits, [&](const Table<3>& table) {
    launch(join_kernel, table.launch.chunks, stream, table);
  });
}

void split_masters(const std::vector<Row<3>>& rows, cudaStream_t stream) {
  for_each_table(rows, kChunkLimits, [&](const Table<3>& table) {
    launch(split_kernel, table.launch.chunks, stream, table);
  });
}

}  // namespace apex_mp::cuda

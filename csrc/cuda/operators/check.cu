// check_ on CUDA. One pass reads every element once and writes a sum of squares for each chunk.
// Then the sums of chunks are added for each tensor. The order depends on the tensor's size and
// alignment, not on which block ends first, so the sums are reproducible.
#include "cuda/launch.h"
#include "cuda/loops.h"
#include "cuda/reduce.h"
#include "cuda/table.h"

namespace apex_mp::cuda {
namespace {

__global__ void __launch_bounds__(kBlockSize)
    check_kernel(const __grid_constant__ Table<1> table, double* chunk_sums, float* found_inf) {
  const Part<1> part = part_of_block(table);
  int32_t found = 0;
  const double sum = block_sum(sum_squares(part, found));
  if (threadIdx.x == 0) chunk_sums[table.launch.first_chunk + blockIdx.x] = sum;
  if (found) *found_inf = 1.0f;  // All writers store the same value.
}

// One block for each tensor of the launch; an empty tensor gets 0.
__global__ void __launch_bounds__(kBlockSize)
    tensor_sums_kernel(const __grid_constant__ Table<1> table, const double* chunk_sums,
                       double* sum_sq) {
  const auto slot = static_cast<int32_t>(blockIdx.x);
  const int64_t begin = table.first_chunk[slot];
  const int64_t end =
      slot + 1 < table.launch.tensors ? table.first_chunk[slot + 1] : table.launch.chunks;
  double sum = 0.0;
#pragma unroll 4
  for (int64_t chunk = begin + threadIdx.x; chunk < end; chunk += kBlockSize) {
    sum += chunk_sums[table.launch.first_chunk + chunk];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sum_sq[table.place[slot]] = sum;
}

}  // namespace

int64_t count_sums(const std::vector<Row<1>>& tensors) {
  int64_t count = 0;
  for (const Row<1>& tensor : tensors) count += count_chunks(tensor.size, kLargestChunk);
  return count;
}

void sum_chunks(const std::vector<Row<1>>& tensors, const double* chunk_sums, double* sum_sq,
                cudaStream_t stream) {
  for_each_table(tensors, kSumLimits, [&](const Table<1>& table) {
    launch(tensor_sums_kernel, table.launch.tensors, stream, table, chunk_sums, sum_sq);
  });
}

void check(const std::vector<Row<1>>& grads, const Check& task, cudaStream_t stream) {
  for_each_table(grads, kSumLimits, [&](const Table<1>& table) {
    launch(check_kernel, table.launch.chunks, stream, table, task.chunk_sums, task.found_inf);
  });
  sum_chunks(grads, task.chunk_sums, task.sum_sq, stream);
}

}  // namespace apex_mp::cuda

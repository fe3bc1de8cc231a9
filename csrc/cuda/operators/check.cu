// check_ and l2_norm_ on CUDA. One pass reads every element once and writes a sum of squares for
// each chunk. Then the sums of chunks are added for each tensor, and those of tensors for each
// group. The order depends on the tensors' sizes and alignment, not on which block ends first, so
// the sums are reproducible.
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
  if (found && found_inf != nullptr) *found_inf = 1.0f;  // All writers store the same value.
}

// One block for each tensor of the launch; an empty tensor gets 0.
__global__ void __launch_bounds__(kBlockSize)
    tensor_sums_kernel(const __grid_constant__ Table<1> table, const double* chunk_sums,
                       double* tensor_sums) {
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
  if (threadIdx.x == 0) tensor_sums[table.launch.first_tensor + slot] = sum;
}

// One block for each group; tensors of a group may lie anywhere in the list.
__global__ void __launch_bounds__(kBlockSize)
    group_sums_kernel(const __grid_constant__ Table<1> table, const double* tensor_sums,
                      double* sum_sq) {
  const auto group = static_cast<int32_t>(blockIdx.x);
  double sum = 0.0;
  for (int64_t slot = threadIdx.x; slot < table.launch.tensors; slot += kBlockSize) {
    if (table.group[slot] == group) sum += tensor_sums[table.launch.first_tensor + slot];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sum_sq[group] += sum;
}

// One block for the whole list.
__global__ void __launch_bounds__(kBlockSize)
    norms_kernel(const double* tensor_sums, int64_t tensors, Array norm, Array norms) {
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < tensors; i += kBlockSize) {
    sum += tensor_sums[i];
    const double root[1] = {sqrt(tensor_sums[i])};
    if (norms.data != nullptr) store(root, norms, static_cast<int>(i), OneNumber{});
  }
  const double root[1] = {sqrt(block_sum(sum))};
  if (threadIdx.x == 0) store(root, norm, 0, OneNumber{});
}

// Runs both passes over the list; returns the sums of tensors, which lie behind those of chunks.
double* sum_tensors(const std::vector<Row<1>>& tensors, double* workspace, float* found_inf,
                    cudaStream_t stream) {
  double* tensor_sums = workspace + workspace_size(tensors) - tensors.size();
  for_each_table(tensors, kSumLimits, [&](const Table<1>& table) {
    launch(check_kernel, table.launch.chunks, stream, table, workspace, found_inf);
    launch(tensor_sums_kernel, table.launch.tensors, stream, table, workspace, tensor_sums);
  });
  return tensor_sums;
}

}  // namespace

int64_t workspace_size(const std::vector<Row<1>>& tensors) {
  auto size = static_cast<int64_t>(tensors.size());
  for (const Row<1>& tensor : tensors) size += count_chunks(tensor.size, kLargestChunk);
  return size;
}

void sum_chunks(const std::vector<Row<1>>& tensors, const double* chunk_sums, double* tensor_sums,
                cudaStream_t stream) {
  for_each_table(tensors, kSumLimits, [&](const Table<1>& table) {
    launch(tensor_sums_kernel, table.launch.tensors, stream, table, chunk_sums, tensor_sums);
  });
}

void check(const std::vector<Row<1>>& grads, const Check& task, cudaStream_t stream) {
  const double* tensor_sums = sum_tensors(grads, task.workspace, task.found_inf, stream);
  for_each_table(grads, kSumLimits, [&](const Table<1>& table) {
    launch(group_sums_kernel, task.groups, stream, table, tensor_sums, task.sum_sq);
  });
}

void l2_norm(const std::vector<Row<1>>& tensors, const L2Norm& task, cudaStream_t stream) {
  const double* tensor_sums = sum_tensors(tensors, task.workspace, nullptr, stream);
  launch(norms_kernel, 1, stream, tensor_sums, static_cast<int64_t>(tensors.size()), task.norm,
         task.norms);
}

}  // namespace apex_mp::cuda

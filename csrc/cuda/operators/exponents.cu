// exponents_ on CUDA: each warp counts in shared memory, then each block adds to the counts of its
// tensor. Sums of integers do not depend on the order.
#include "cuda/launch.h"
#include "cuda/loops.h"
#include "cuda/table.h"
#include "math/exponent.h"

namespace apex_mp::cuda {
namespace {

constexpr int kBins = math::kExponentBins;
static_assert(kBins == kBlockSize, "a thread adds up one bin");

template <typename opmath_t, DType dtype>
__device__ void count_exponents_of(const Part<1>& part, int* counts) {
  constexpr int kBytes = static_cast<int>(size_of(dtype));
  constexpr int kWidth = kBytes == 8 ? 1 : 16 / kBytes;
  constexpr int kCount = kBytes == 8 ? 1 : APEX_MP_READ_VECTORS;
  const char* data = static_cast<const char*>(part.arrays[0].data);
  walk_vectors<kWidth, kCount>(part, [&](int index, auto span) {
    opmath_t numbers[span];
    read_as<dtype>(data, index, span, numbers);
#pragma unroll
    for (const opmath_t number : numbers) atomicAdd(&counts[math::exponent_bin(number)], 1);
  });
}

__device__ void count_exponents(const Part<1>& part, int* counts) {
  switch (part.arrays[0].dtype) {
    case DType::kHalf:
      return count_exponents_of<float, DType::kHalf>(part, counts);
    case DType::kBFloat16:
      return count_exponents_of<float, DType::kBFloat16>(part, counts);
    case DType::kFloat:
      return count_exponents_of<float, DType::kFloat>(part, counts);
    default:
      return count_exponents_of<double, DType::kDouble>(part, counts);
  }
}

__global__ void __launch_bounds__(kBlockSize)
    exponents_kernel(const __grid_constant__ Table<1> table, int64_t* counts) {
  constexpr int kWarps = kBlockSize / kWarpSize;
  __shared__ int of_warps[kWarps][kBins];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) of_warps[warp][threadIdx.x] = 0;
  __syncthreads();
  const Part<1> part = part_of_block(table);
  count_exponents(part, of_warps[threadIdx.x / kWarpSize]);
  __syncthreads();
  int count = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) count += of_warps[warp][threadIdx.x];
  if (count == 0) return;
  int64_t* of_tensor = counts + (table.launch.first_tensor + part.slot) * kBins;
  // CUDA's 64-bit addition is of this type alone; the bits are those of int64_t.
  atomicAdd(reinterpret_cast<unsigned long long*>(of_tensor + threadIdx.x),
            static_cast<unsigned long long>(count));
}

}  // namespace

void exponents(const std::vector<Row<1>>& tensors, int64_t* counts, cudaStream_t stream) {
  for_each_table(tensors, kChunkLimits, [&](const Table<1>& table) {
    launch(exponents_kernel, table.launch.chunks, stream, table, counts);
  });
}

}  // namespace apex_mp::cuda

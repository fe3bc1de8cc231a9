// The sum over the threads of a block, in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.h"

namespace apex_mp::cuda {

constexpr int kWarpSize = 32;

// Returns the sum in thread 0, something else in the others. Every thread of the block must come
// here, and only once in a kernel: a second call would need a barrier before it writes `sums`
// again.
__device__ inline double block_sum(double value) {
  __shared__ double sums[kBlockSize / kWarpSize];
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < kBlockSize / kWarpSize; ++warp) value += sums[warp];
  }
  return value;
}

}  // namespace apex_mp::cuda

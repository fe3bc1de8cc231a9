// The sum over the threads of a warp or of a block, in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.h"

namespace apex_mp::cuda {

constexpr int kWarpSize = 32;

// Returns the sum in lane 0, something else in the others. Every lane must come here.
__device__ inline double warp_sum(double value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Returns the sum in thread 0, something else in the others. Every thread of the block must come
// here; a second call in one kernel needs a barrier before it, as it writes `sums` again.
// Static: each file has its own shared memory, also where a host compiler takes it for variables.
static __device__ inline double block_sum(double value) {
  __shared__ double sums[kBlockSize / kWarpSize];
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < kBlockSize / kWarpSize; ++warp) value += sums[warp];
  }
  return value;
}

}  // namespace apex_mp::cuda

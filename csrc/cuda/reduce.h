// Sums over the threads of a warp or of a block, in a fixed order. For all kernels with sums.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.h"

namespace apex_mp::cuda {

struct Sum {
  __device__ double operator()(double one, double other) const { return one + other; }
};
struct Max {
  __device__ double operator()(double one, double other) const { return fmax(one, other); }
};

// Returns the result in lane 0, something else in the others. Every lane must call it.
template <typename Combine>
__device__ double warp_reduce(double value, Combine combine) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_down_sync(0xffffffffu, value, offset));
  }
  return value;
}

__device__ inline double warp_sum(double value) { return warp_reduce(value, Sum()); }

// Returns the result in thread 0, something else in the others. Every thread of the block must call
// it; a second call in one kernel needs a barrier before it, because it writes `results` again.
// Static, so that each file has its own shared memory, also for a host compiler.
template <typename Combine>
static __device__ double block_reduce(double value, Combine combine) {
  __shared__ double results[kBlockSize / kWarpSize];
  value = warp_reduce(value, combine);
  if (threadIdx.x % kWarpSize == 0) results[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < kBlockSize / kWarpSize; ++warp) {
      value = combine(value, results[warp]);
    }
  }
  return value;
}

static __device__ inline double block_sum(double value) { return block_reduce(value, Sum()); }
static __device__ inline double block_max(double value) { return block_reduce(value, Max()); }

}  // namespace apex_mp::cuda

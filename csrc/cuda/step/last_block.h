// Which block of a grid ends last, so that it can go on with what the others have left in memory.
// For step/check.cu.
#pragma once

#include <cuda_runtime.h>

namespace apex_mp::cuda {

// Returns true in all threads of one block: the last of `blocks` that come here, in one launch or
// in several on one stream. `arrived` must be 0 before the first; the last block leaves it 0, so
// it is clear for the next step. Every thread of every block must come here, once.
//
// The protocol, as in cooperative groups: the barrier hands the writes of the block's threads to
// thread 0, whose fence puts them before its count; the last block's fence and barrier put the
// reads of all its threads behind the count. What other blocks wrote in this launch is then to be
// read past the first-level cache, with __ldcg().
static __device__ inline bool is_last_block(unsigned int* arrived, unsigned int blocks) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(arrived, blocks - 1) == blocks - 1;  // Begins again at 0 behind the last.
    if (is_last) __threadfence();
  }
  __syncthreads();
  return is_last;
}

}  // namespace apex_mp::cuda

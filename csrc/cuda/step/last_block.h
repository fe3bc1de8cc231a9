// Finds the block of a grid that ends last, which can then use what the others have written. For
// step/check.cu.
#pragma once

#include <cuda_runtime.h>

namespace apex_mp::cuda {

// Returns true in all threads of one block: the last of `blocks` that call it, in one launch or in
// several on one stream. `arrived` must be 0 before the first; the last block sets it to 0 again
// for the next step. Every thread of every block must call it, once.
//
// The protocol is that of cooperative groups: the barrier makes the writes of the block's threads
// visible to thread 0, whose fence orders them before its count; the last block's fence and barrier
// order the reads of all its threads after the count. What other blocks wrote in this launch must
// be read past the first-level cache, with __ldcg().
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

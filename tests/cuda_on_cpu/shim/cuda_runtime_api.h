// Stands for the CUDA toolkit's header: the host's side of it, as far as csrc/cuda/ uses it.
#pragma once

#include <cstddef>
#include <cstring>

#include "execution.h"
#include "streams.h"

// CUDART_VERSION is defined by the build: it decides how work is cut into launches.

using cudaStream_t = cuda_on_cpu::Stream;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

using cudaEvent_t = cuda_on_cpu::Clock*;
constexpr unsigned int cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = new cuda_on_cpu::Clock{};
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  cuda_on_cpu::record(*event, stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  cuda_on_cpu::wait(*event, stream);
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

// Parsed wherever a header holds device code, also without the device's functions.
#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)

// All in one section, so that it can be filled with garbage before each block.
#define __shared__ static __attribute__((section("cuda_shared")))

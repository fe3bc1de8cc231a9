// Stands for the CUDA toolkit's header: the host's side of it, as far as csrc/cuda/ uses it.
#pragma once

#include "execution.h"

// CUDART_VERSION is defined by the build: it decides how work is cut into launches.

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

// Parsed wherever a header holds device code, also without the device's functions.
#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)

// All in one section, so that it can be filled with garbage before each block.
#define __shared__ static __attribute__((section("cuda_shared")))

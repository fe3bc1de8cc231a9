// Stands for the CUDA toolkit's header: the device's side of it, as far as csrc/cuda/ uses it.
// Whoever needs another function of CUDA adds it here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <source_location>

#include "cuda_runtime_api.h"

using cuda_on_cpu::blockDim;
using cuda_on_cpu::blockIdx;
using cuda_on_cpu::gridDim;
using cuda_on_cpu::threadIdx;

struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }

// The place of the call goes along: threads that wait must wait at the same one.
inline void __syncthreads(std::source_location where = std::source_location::current()) {
  cuda_on_cpu::wait_at_barrier(where);
}

template <typename T>
T __shfl_down_sync(unsigned int mask, T value, unsigned int offset,
                   std::source_location where = std::source_location::current()) {
  static_assert(sizeof(T) <= cuda_on_cpu::kLargestShuffled);
  const unsigned int lane = threadIdx.x % 32;
  const unsigned int source = lane + offset < 32 ? lane + offset : lane;
  cuda_on_cpu::shuffle({mask, source, &value, sizeof(value), where});
  return value;
}

namespace cuda_on_cpu {

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace cuda_on_cpu

inline float __uint_as_float(unsigned int bits) { return cuda_on_cpu::bits_as<float>(bits); }
inline unsigned int __float_as_uint(float x) { return cuda_on_cpu::bits_as<unsigned int>(x); }
inline double __hiloint2double(int high, int low) {
  return cuda_on_cpu::bits_as<double>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 |
                                      static_cast<uint32_t>(low));
}
inline int __double2loint(double x) {
  return static_cast<int>(static_cast<uint32_t>(cuda_on_cpu::bits_as<uint64_t>(x)));
}
inline int __double2hiint(double x) {
  return static_cast<int>(static_cast<uint32_t>(cuda_on_cpu::bits_as<uint64_t>(x) >> 32));
}

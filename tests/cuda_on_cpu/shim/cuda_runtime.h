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
struct alignas(16) double2 {
  double x, y;
};
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }

// How memory is cached makes no difference here; which types there are is as on the device.
inline double2 __ldcg(const double2* src) { return *src; }
inline double __ldcg(const double* src) { return *src; }
inline int __ldcg(const int* src) { return *src; }
inline unsigned long long __ldcg(const unsigned long long* src) { return *src; }

template <typename Word>
Word __ldcs(const Word* src) {
  return *src;
}

template <typename Word>
void __stcs(Word* dst, Word word) {
  *dst = word;
}

// There is one space of addresses. GCC has no such builtin.
inline bool __isGlobal(const void*) { return true; }
inline void __builtin_assume(bool) {}

// Blocks run one after another, threads until they wait: nobody comes between, and all is visible.
inline void __threadfence() {}

inline unsigned int atomicInc(unsigned int* address, unsigned int last) {
  const unsigned int old = *address;
  *address = old >= last ? 0 : old + 1;
  return old;
}

inline int atomicAdd(int* address, int value) {
  const int old = *address;
  *address += value;
  return old;
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  const unsigned long long before = *address;
  *address += value;
  return before;
}

inline int atomicMin(int* address, int value) {
  const int old = *address;
  if (value < old) *address = value;
  return old;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

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

template <typename T>
T __shfl_xor_sync(unsigned int mask, T value, unsigned int lanes,
                  std::source_location where = std::source_location::current()) {
  static_assert(sizeof(T) <= cuda_on_cpu::kLargestShuffled);
  cuda_on_cpu::shuffle({mask, (threadIdx.x % 32) ^ lanes, &value, sizeof(value), where});
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

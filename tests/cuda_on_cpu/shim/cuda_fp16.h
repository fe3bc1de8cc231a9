// Stands for the CUDA toolkit's header: float16 as bits, rounded to the nearest, ties to even.
#pragma once

#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }

inline float __half2float(__half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  const uint32_t magnitude = half.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // inf and NaN
    return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  // Exponents of float16 are 112 below those of float32, which holds its denormal numbers as well.
  const float value = __uint_as_float(magnitude << 13) * 0x1p112f;
  return __uint_as_float(sign | __float_as_uint(value));
}

inline __half __float2half_rn(float x) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};  // NaN: what CUDA makes of each
  uint32_t result;
  if (magnitude >= 0x477ff000u) {  // 65520 and more
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2**-14: a normal number; a carry goes to the exponent
    result = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  } else {  // Adding 0.5 leaves multiples of 2**-24: the addition rounds.
    result = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<unsigned short>(sign | result)};
}

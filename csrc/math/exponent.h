// The exponent of a number, for a histogram.
#pragma once

#include <cstdint>
#include <cstring>

#include "math/common.h"

namespace apex_mp::math {

// Bins are the exponent bits of float32: bin 127 is [1, 2). Zeros are in bin 0, inf and NaN in the
// last one. Bin 1 has 2**-126 to 2**-125, and all smaller numbers that are not zero.
constexpr int kExponentBins = 256;

APEX_MP_MATH int32_t exponent_bin(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const uint32_t size = bits & 0x7fffffffu;
  const uint32_t exponent = size >> 23;
  return static_cast<int32_t>(exponent + (exponent == 0 && size != 0));
}

// A double outside of the range of float32 is in its first or last finite bin.
APEX_MP_MATH int32_t exponent_bin(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const uint64_t size = bits & 0x7fffffffffffffffull;
  if (size == 0) return 0;
  const auto exponent = static_cast<int32_t>(size >> 52);
  if (exponent == 0x7ff) return kExponentBins - 1;
  const int32_t bin = exponent - 1023 + 127;
  return bin < 1 ? 1 : bin > kExponentBins - 2 ? kExponentBins - 2 : bin;
}

}  // namespace apex_mp::math

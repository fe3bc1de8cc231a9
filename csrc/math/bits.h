// A float as its bits, and back.
#pragma once

#include <cstdint>
#include <cstring>

#include "math/common.h"

namespace apex_mp::math {

APEX_MP_MATH uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// The second argument chooses the type: there is another function for registers of floats.
APEX_MP_MATH float from_bits(uint32_t bits, float) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

}  // namespace apex_mp::math

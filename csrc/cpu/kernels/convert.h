// fp16 and bf16 <-> fp32, one number at a time: the baseline, and the tails of the register loops.
// For the kernels of all levels.
#pragma once

#include <cstdint>

#include "math/bits.h"
#include "math/rounding.h"

namespace apex_mp::cpu {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

using math::bits_of;
using math::from_bits;

// Both branches are computed and one is selected, so that the loop around it vectorises.
APEX_MP_MATH float widen(Half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(half.bits & 0x7fffu) << 13;
  // Move the exponent's bias from 15 to 127; an all-ones exponent must stay all ones.
  const uint32_t rebias = rest >= (0x7c00u << 13) ? 0x70000000u : 0x38000000u;
  const uint32_t normal = rest + rebias;
  // A subnormal half is its mantissa times 2**-24: let the float unit normalise it.
  const uint32_t subnormal =
      bits_of(from_bits(rest + 0x38800000u, 0.0f) - from_bits(0x38800000u, 0.0f));
  return from_bits(sign | (rest < (0x0400u << 13) ? subnormal : normal), 0.0f);
}

// Round to nearest, ties to even; overflow to infinity; NaN stays NaN.
APEX_MP_MATH void narrow(float x, Half& half) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal halves: rebias, and round by adding half an ulp (less one, plus the last kept bit).
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal halves: adding 0.5 puts the last bit of the result at 2**-24, and the float unit
  // rounds.
  const uint32_t subnormal = bits_of(from_bits(magnitude, 0.0f) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t infinite = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // 65520 is the first float that rounds to infinity.
  half.bits = static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? infinite : finite));
}

APEX_MP_MATH float widen(BFloat16 bfloat16) {
  return from_bits(static_cast<uint32_t>(bfloat16.bits) << 16, 0.0f);
}

// Rounds by what is added, see math/rounding.h.
APEX_MP_MATH BFloat16 narrow_with(uint32_t added, float x) {
  return {static_cast<uint16_t>(math::bfloat16_bits(bits_of(x), x != x, added))};
}

// Round to nearest, ties to even; every NaN becomes the same one.
APEX_MP_MATH void narrow(float x, BFloat16& bfloat16) {
  bfloat16 = narrow_with(math::to_nearest(bits_of(x)), x);
}

}  // namespace apex_mp::cpu

// Rounding of a float32 to the 16 bits of a bfloat16: a number is added, then the lower half is cut
// off.
//
// Stochastic rounding adds random bits. The nearer the number is to one of its two neighbours, the
// more often it is rounded to that one: the result is right on average, and changes too small for
// bfloat16 are not lost. The random bits are a hash of the parameter's position, its count of steps
// and the element, so a step can be repeated, and is the same on every device.
//
// bits_t is uint32_t, or a register of them.
#pragma once

#include <cstdint>

#include "math/bits.h"

namespace apex_mp::math {

// Rounds to nearest, ties to even.
template <typename bits_t>
APEX_MP_MATH bits_t to_nearest(bits_t bits) {
  return ((bits >> 16) & 1u) + 0x7fffu;
}

// `added` is below 2**16; every NaN becomes the same one.
template <typename bits_t, typename mask_t>
APEX_MP_MATH bits_t bfloat16_bits(bits_t bits, mask_t is_nan, bits_t added) {
  const bits_t rounded = (bits + added) >> 16;
  const bits_t nan = bits_t{} + 0x7fc0u;
  return is_nan ? nan : rounded;
}

// How the state of a parameter is rounded in one step.
struct Rounding {
  bool is_stochastic;
  uint32_t keys[2];
};

// The hash lowbias32 of Christopher Wellons' "hash prospector", with a key before each of its two
// multiplications: with one only, two keys would give the same numbers in another order.
template <typename bits_t>
APEX_MP_MATH bits_t random_bits(bits_t number, uint32_t first_key, uint32_t second_key) {
  bits_t bits = number + first_key;
  bits ^= bits >> 16;
  bits *= 0x7feb352du;
  bits ^= bits >> 15;
  bits += second_key;
  bits *= 0x846ca68bu;
  bits ^= bits >> 16;
  return bits;
}

APEX_MP_MATH Rounding stochastic_rounding(int32_t position, float step) {
  const uint32_t first = random_bits(bits_of(step), static_cast<uint32_t>(position), 0u);
  return {true, {first, random_bits(first, 0u, 1u)}};
}

// 32 bits for an element of a parameter: the lower half is for the first tensor of state, the upper
// half for the second one. Elements are counted modulo 2**32.
template <typename bits_t>
APEX_MP_MATH bits_t random_bits(bits_t element, const Rounding& rounding) {
  return random_bits(element, rounding.keys[0], rounding.keys[1]);
}

template <typename bits_t>
APEX_MP_MATH bits_t half_for(int tensor, bits_t random) {
  return tensor == 0 ? random & 0xffffu : random >> 16;
}

}  // namespace apex_mp::math

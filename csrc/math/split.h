// A float32 master as a 16-bit weight and a 16-bit remainder, the part that rounding cut off.
//
// Magnitudes of floats are in the order of their bits. The remainder counts the floats from the
// weight to the master, negative if the master is the smaller of the two. So a join is an addition,
// and the sign is the weight's.
//
//   bfloat16  Every master is exact: the remainder is its lower half. The weight is the nearest
//             bfloat16; of two that are equally near the larger one, since the remainder goes from
//             -2**15 to 2**15 - 1. (Apex and TransformerEngine have the same format.)
//   float16   From 2**-16 on every master is exact; the weight is the nearest float16, of two that
//             are equally near the even one. Below, where float16 is coarse beside float32, the
//             remainder counts steps of 2**-40: the error is 2**-41 or less.
//
// A master beyond float16 becomes inf, as the weight does; the payload of a NaN is lost.
//
// A weight may be written without what is kept beside it: a master that does not round to its
// weight is the weight. A bfloat16 and any remainder are a master that rounds to it. A float16 is
// compared with what it and the remainder are, and with a whole master, a float kept beside it. Of
// two bfloat16 that are equally near, either may be there, since both ways to round are in use.
//
// number_t is float, or a register of floats with bits_of(), from_bits() and operators; bits_t are
// its bits. A join takes a weight as a float and a remainder as 32 bits with its sign; a split
// returns both in the lower 16 of 32 bits, and the upper ones are 0.
#pragma once

#include <cstdint>

#include "math/bits.h"

namespace apex_mp::math {

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kExactFrom = 0x37800000u;  // the bits of 2**-16

// Nothing is below zero or above infinity.
template <typename number_t, typename bits_t>
APEX_MP_MATH number_t join_bfloat16(number_t weight, bits_t remainder) {
  const bits_t bits = bits_of(weight);
  const bits_t size = bits & 0x7fffffffu;
  const auto is_below = (remainder & 0x80000000u) != 0u;
  const auto is_beyond = (size == (is_below ? bits_t{} : bits_t{} + kInfinityBits));
  return from_bits(bits + (is_beyond ? bits_t{} : remainder), number_t());
}

template <typename bits_t>
APEX_MP_MATH void split_bfloat16(bits_t master, bits_t& weight, bits_t& remainder) {
  const auto is_nan = (master & 0x7fffffffu) > kInfinityBits;
  weight = is_nan ? master >> 16 | 0x0040u : (master + 0x8000u) >> 16;
  remainder = is_nan ? bits_t{} : master & 0xffffu;
}

// From a normal float16 to the middle between it and the next one.
constexpr uint32_t kFloatsToTie = 0x1000u;

// 1.5 * 2**23: the sum with a whole number has that number in its lowest bits.
constexpr float kUnits = 12582912.0f;
constexpr uint32_t kUnitsBits = 0x4b400000u;

// A remainder of another weight may be too large for this one: see rounds_to_float16().
template <typename number_t, typename bits_t>
APEX_MP_MATH number_t join_float16(number_t weight, bits_t remainder) {
  const bits_t bits = bits_of(weight);
  const bits_t size = bits & 0x7fffffffu;
  const auto is_below_zero = (size == 0u) & ((remainder & 0x80000000u) != 0u);
  const bits_t rest = is_below_zero ? bits_t{} : remainder;
  const number_t steps = from_bits(kUnitsBits + rest, number_t()) - number_t(kUnits);
  const number_t below = from_bits(size, number_t()) + steps * number_t(0x1p-40f);
  const bits_t signed_below = (bits & 0x80000000u) | bits_of(below);
  return from_bits(size < kExactFrom ? signed_below : bits + rest, number_t());
}

// `half` is the master as a float16, to nearest even, and `wide` that as a float.
template <typename number_t, typename bits_t>
APEX_MP_MATH void split_float16(number_t master, bits_t half, number_t wide, bits_t& weight,
                                bits_t& remainder) {
  const bits_t size = bits_of(master) & 0x7fffffffu;
  const bits_t wide_size = bits_of(wide) & 0x7fffffffu;
  const number_t left = from_bits(size, number_t()) - from_bits(wide_size, number_t());
  const bits_t steps = bits_of(left * number_t(0x1p40f) + number_t(kUnits));
  // 2**15 steps up are the next weight with 2**15 steps down.
  const auto is_up = (size < kExactFrom) & (steps == kUnitsBits + 0x8000u);
  const bits_t floats = size < kExactFrom ? steps : size - wide_size;
  weight = is_up ? half + 1u : half;
  remainder = wide_size < kInfinityBits ? floats & 0xffffu : bits_t{};
}

// Whether a master rounds to a weight.
template <typename number_t>
APEX_MP_MATH auto rounds_to_bfloat16(number_t master, number_t weight) {
  return bits_of(master) - bits_of(weight) + 0x8000u <= 0x10000u;
}

// The same; `half` is the master as a float16, to nearest even, as a float. Where remainders are
// steps of 2**-40, float16 are 2**-24 apart, and a split may have rounded to the other one up to
// 2**-41 beyond the middle.
template <typename number_t>
APEX_MP_MATH auto rounds_to_float16(number_t master, number_t half, number_t weight) {
  const auto is_coarse = (bits_of(weight) & 0x7fffffffu) <= kExactFrom;
  const auto most = is_coarse ? bits_of(number_t(0x1.0001p-25f)) : bits_of(number_t(0.0f));
  const auto off = bits_of(master - weight) & 0x7fffffffu;
  return (bits_of(half) == bits_of(weight)) | (off <= most);
}

template <typename mask_t, typename number_t>
APEX_MP_MATH number_t held_if(mask_t rounds, number_t master, number_t weight) {
  return from_bits(rounds ? bits_of(master) : bits_of(weight), number_t());
}

}  // namespace apex_mp::math

// A moment in one byte: the code of a number in a block of 32, whose largest number gives all of
// them one exponent, as in the Microscaling formats of the Open Compute Project.
//
// A code is a small float. Of the first tensor of state it has a sign, 3 bits of exponent and 4 of
// mantissa, so that numbers from 1/116 of the block's largest one on are kept within 1/16 of
// themselves, to nearest within 1/32. The second tensor, which is never negative, has 4 bits of
// each, and keeps numbers from 1/29,000 of the largest one on. Code 0 is 0. Below the smallest code
//
//   - a number of the first tensor becomes 0 or that code, at random or the nearer one;
//   - a positive number of the second tensor becomes that code, because a step divides by its root.
//
// A block with inf, NaN or numbers above 3.29e38 holds NaN alone. Exponents begin at 2**-119
// (first) and 2**-111 (second): a block of smaller numbers is kept as in one whose largest number
// has that.
//
// A block counts along memory, from the first number of a tensor, or of the part of it that a
// process has; the last block may be shorter.
#pragma once

#include <cstdint>

#include "math/bits.h"

namespace apex_mp::math {

constexpr int kCodeBlock = 32;         // numbers with one exponent
constexpr int64_t kLeastCoded = 4096;  // smaller parameters keep floats
constexpr uint32_t kCodeShift = 19;    // of the last bit of mantissa, in a float
constexpr uint32_t kCodeUnit = 1u << kCodeShift;
constexpr uint32_t kAllNan = 255;  // as an exponent

APEX_MP_MATH int64_t count_code_blocks(int64_t numbers) {
  return (numbers + kCodeBlock - 1) / kCodeBlock;
}

// The largest code of a tensor of state, without its sign.
APEX_MP_MATH constexpr uint32_t largest_code(int which) { return which == 0 ? 127u : 255u; }

// The bits of the larger of `largest` and the size of a number.
APEX_MP_MATH uint32_t larger_bits(uint32_t largest, float x) {
  const uint32_t size = bits_of(x) & 0x7fffffffu;
  return size > largest ? size : largest;
}

// The exponent of a block: that of a float which no number of the block is rounded beyond.
// `largest` are the bits of the largest absolute value.
APEX_MP_MATH uint32_t block_exponent(int which, uint32_t largest) {
  const uint32_t exponent = (largest + (kCodeUnit - 1u)) >> 23;
  const uint32_t least = which == 0 ? 8u : 16u;
  const uint32_t above = exponent < least ? least : exponent;
  return above < kAllNan ? above : kAllNan;
}

// What is added to a code to get the upper bits of its float.
APEX_MP_MATH uint32_t code_offset(int which, uint32_t exponent) {
  return (exponent << 4) + 15u - largest_code(which);
}

// The formulas below are for numbers, and for registers of them: bits_t is uint32_t or a register,
// number_t a float or a register. `offset` is that of the block.
template <typename bits_t>
APEX_MP_MATH bits_t decoded_bits(int which, bits_t code, uint32_t offset) {
  const bits_t size = code & largest_code(which);
  const bits_t bits = (size + offset) << kCodeShift;
  return size == 0u ? bits_t{} : which == 0 ? bits | (code & 128u) << 24 : bits;
}

APEX_MP_MATH float decode(int which, uint32_t code, uint32_t offset) {
  return from_bits(decoded_bits(which, code, offset), 0.0f);
}

// How numbers are rounded: `added` to their bits before the lower ones are cut off, and the part of
// the smallest code from which on they are not 0.
template <typename number_t, typename bits_t>
struct CodeRounding {
  bits_t added;
  number_t part;
};

// To nearest, ties to even.
template <typename number_t>
APEX_MP_MATH auto code_to_nearest(number_t x) {
  const auto added = ((bits_of(x) >> kCodeShift) & 1u) + (kCodeUnit / 2u - 1u);
  return CodeRounding<number_t, decltype(bits_of(x))>{added, number_t(0.5f)};
}

// `random` is below 2**16.
template <typename number_t, typename bits_t>
APEX_MP_MATH CodeRounding<number_t, bits_t> code_at_random(number_t, bits_t random) {
  const number_t part = from_bits(random << 7 | 0x3f800000u, number_t()) - number_t(1.0f);
  return {random << (kCodeShift - 16u), part};
}

// For a block that is not all NaN. A negative zero keeps its sign, which decoding drops.
template <typename number_t, typename bits_t>
APEX_MP_MATH bits_t encode(int which, number_t x, uint32_t offset,
                           const CodeRounding<number_t, bits_t>& rounding) {
  const bits_t bits = bits_of(x) & 0x7fffffffu;
  const uint32_t smallest = (offset + 1u) << kCodeShift;
  // Positive floats are in the order of their bits.
  const bits_t least =
      which == 0 ? bits_of(rounding.part * number_t(from_bits(smallest, 0.0f))) : bits_t{};
  const bits_t below = bits > least ? bits_t{} + 1u : bits_t{};
  const bits_t code = bits < smallest ? below : ((bits + rounding.added) >> kCodeShift) - offset;
  return which == 0 ? code | ((bits_of(x) >> 24) & 128u) : code;
}

}  // namespace apex_mp::math

// What the engine (csrc/step, cpu/step, cuda/step) asks of an optimizer. A rule is a struct of
// static members, as Adam in math/adam.h; math/rules.h lists them all. What RuleBase has may be
// left out.
//
//   Factors<opmath_t>   what the update of a number needs; the same for a whole tensor
//   kName               by which Python asks for the rule
//   kSparseAdvice       how the sentence ends that refuses sparse gradients
//   kOptions            of a parameter group, in the order of `options` below
//   kTensors            how many tensors of state a parameter has, which are laid out as it is
//   kAllTensors         whether it always has all of them
//   tensors()           if not kAllTensors: how many with these options, those that come first
//   kNumbers            how many float32 numbers of state it has
//   kNeedsNumbers       whether they must be there, and the first one counts steps; if not, a
//                       missing one reads as 0
//   kPrepared           how many numbers prepare() makes, once for a tensor and step
//   kNorm               which of them needs the norm of the tensor's gradient; -1: none
//   wants_max()         if kNorm >= 0: whether that is the maximum norm, else it is the l2 norm
//   kRatio              which of them needs the l2 norms of parameter and update; -1: none. Another
//                       pass then measures them before the step; it writes nothing
//   prepare()           from options, numbers before the step and norms, what factors() and
//                       advance() need
//   factors()           from those; a gradient is to be multiplied by `grad_factor`
//   direction()         if kRatio >= 0: the update of a number, whose norm is meant, from factors
//                       for a ratio that is not known yet; changes `tensors` as update() does
//   update()            steps one number: parameter, tensors of state. opmath_t is float, double
//                       or a register of numbers with operators and sqrt
//   advance()           a number of state after the step
#pragma once

#include "math/common.h"

namespace apex_mp::math {

enum class Range { kAny, kNotNegative, kBelowOne, kZeroOrTwo, kBool };

// An option of a parameter group: a number, or, with count 2, two numbers in a tuple.
struct Option {
  const char* name;
  Range range;
  int count = 1;
};

// Sums of squares, of a part of a tensor.
struct Measured {
  double param;
  double update;
};

// Of a tensor. 0 where the rule has not asked for one, or it is not known yet.
struct Norms {
  double grad;    // unscaled and clipped
  double param;   // before the step
  double update;  // what direction() returns
};

// What is so for most rules.
struct RuleBase {
  static constexpr const char* kSparseAdvice = "";
  static constexpr bool kAllTensors = true;
  static constexpr int kNumbers = 0;
  static constexpr bool kNeedsNumbers = true;
  static constexpr int kPrepared = 0;
  static constexpr int kNorm = -1;
  static constexpr int kRatio = -1;
};

// The same factors as numbers of another type, if they are numbers of one type and nothing else.
template <typename to_t, template <typename> class Factors, typename from_t>
APEX_MP_MATH Factors<to_t> factors_as(const Factors<from_t>& factors) {
  constexpr int kCount = sizeof(factors) / sizeof(from_t);
  static_assert(sizeof(Factors<to_t>) == kCount * sizeof(to_t));
  Factors<to_t> result;
  const auto* from = reinterpret_cast<const from_t*>(&factors);
  auto* to = reinterpret_cast<to_t*>(&result);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < kCount; ++i) to[i] = static_cast<to_t>(from[i]);
  return result;
}

// How many numbers the options are.
template <typename Rule>
constexpr int count_options() {
  int count = 0;
  for (const Option& option : Rule::kOptions) count += option.count;
  return count;
}

}  // namespace apex_mp::math

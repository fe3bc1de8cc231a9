// The interface of an optimizer for the engine (csrc/plan, cpu/step, cuda/step). A rule is a struct
// of static members, such as Adam in math/adam.h; math/rules.h lists all rules. Members of RuleBase
// may be left out.
//
//   Factors<opmath_t>   the factors of an update, the same for all numbers of a tensor
//   kName               the name of the rule in Python
//   kSparseAdvice       the end of the message that refuses sparse gradients
//   kOptions            the options of a parameter group, in the order of `options` below
//   kTensors            how many state tensors a parameter has; they have its layout
//   kAllTensors         whether it always has all of them
//   tensors()           if not kAllTensors: how many of them, the first ones, with these options
//   kNumbers            how many float32 numbers the state has
//   kNeedsNumbers       whether they must exist, and the first one counts steps; if not, a missing
//                       one reads as 0
//   kPrepared           how many numbers prepare() computes, once for a tensor and step
//   kNorm               which of them needs the norm of the tensor's gradient; -1: none
//   wants_max()         if kNorm >= 0: whether that is the maximum norm, else it is the l2 norm
//   kRatio              which of them needs the l2 norms of parameter and update; -1: none. Another
//                       pass, which writes nothing, measures them before the step
//   kTakesCodes         whether the state may be kept in one byte (math/codes.h): all tensors are
//   moments,
//                       the first one with a sign and the second one without
//   prepare()           computes numbers for factors() and advance() from options, numbers of the
//                       state before the step, and norms
//   factors()           computes factors from prepared numbers; gradients are multiplied by
//                       `grad_factor`
//   direction()         if kRatio >= 0: computes the update whose norm is measured, from factors
//                       without a ratio; changes `tensors` as update() does
//   update()            steps one number of the parameter and its state tensors. opmath_t is float,
//                       double or a register of numbers with operators and sqrt
//   advance()           returns a number of the state after the step
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

// Sums of squares of a part of a tensor.
struct Measured {
  double param;
  double update;
};

// Norms of a tensor; 0 if the rule does not need one, or it is not known yet.
struct Norms {
  double grad;    // unscaled and clipped
  double param;   // before the step
  double update;  // what direction() returns
};

// The values of most rules.
struct RuleBase {
  static constexpr const char* kSparseAdvice = "";
  static constexpr bool kAllTensors = true;
  static constexpr int kNumbers = 0;
  static constexpr bool kNeedsNumbers = true;
  static constexpr int kPrepared = 0;
  static constexpr int kNorm = -1;
  static constexpr int kRatio = -1;
  static constexpr bool kTakesCodes = false;
};

// Converts factors that are all numbers of one type to another type.
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

// The number of numbers in the options.
template <typename Rule>
constexpr int count_options() {
  int count = 0;
  for (const Option& option : Rule::kOptions) count += option.count;
  return count;
}

}  // namespace apex_mp::math

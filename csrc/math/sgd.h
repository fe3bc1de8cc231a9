// One step of stochastic gradient descent for one number, with momentum as torch.optim.SGD has it
// (Sutskever et al. 2013 for Nesterov's).
#pragma once

#include "math/common.h"
#include "math/rule.h"

namespace apex_mp::math {

// The factors of an update; the same for a whole tensor.
template <typename opmath_t>
struct SgdFactors {
  opmath_t inv_scale;
  opmath_t lr;
  opmath_t momentum;
  opmath_t one_minus_dampening;
  opmath_t early_decay;  // one of the two is zero: the update has no branch for them
  opmath_t late_decay;
  bool has_momentum;
  bool is_fresh;  // the buffer holds nothing yet
  bool nesterov;
};

// In place of factors_as() of rule.h, because three factors are not numbers.
template <typename to_t, typename from_t>
APEX_MP_MATH SgdFactors<to_t> factors_as(const SgdFactors<from_t>& factors) {
  return {static_cast<to_t>(factors.inv_scale),
          static_cast<to_t>(factors.lr),
          static_cast<to_t>(factors.momentum),
          static_cast<to_t>(factors.one_minus_dampening),
          static_cast<to_t>(factors.early_decay),
          static_cast<to_t>(factors.late_decay),
          factors.has_momentum,
          factors.is_fresh,
          factors.nesterov};
}

// The rule of SGD, see rule.h.
struct Sgd : RuleBase {
  template <typename opmath_t>
  using Factors = SgdFactors<opmath_t>;

  static constexpr const char* kName = "sgd";
  static constexpr const char* kSparseAdvice = "; layers with sparse=False have dense ones";
  static constexpr Option kOptions[] = {{"momentum", Range::kNotNegative},
                                        {"dampening", Range::kAny},
                                        {"weight_decay", Range::kNotNegative},
                                        {"nesterov", Range::kBool},
                                        {"wd_after_momentum", Range::kBool}};
  enum { kMomentum, kDampening, kWeightDecay, kNesterov, kDecayAfterMomentum };
  static constexpr int kTensors = 1;  // momentum_buffer
  static constexpr bool kAllTensors = false;
  static constexpr int kNumbers = 1;  // not 0: the buffer holds nothing yet; not there: it does
  static constexpr bool kNeedsNumbers = false;
  static constexpr int kPrepared = 1;  // the same

  APEX_MP_MATH int tensors(const double* options) { return options[kMomentum] != 0.0 ? 1 : 0; }

  APEX_MP_MATH double prepare(int, const double*, const float* numbers, const Norms&) {
    return numbers[0];
  }

  APEX_MP_MATH float advance(int, const float*, const double*) { return 0.0f; }

  APEX_MP_MATH SgdFactors<double> factors(const double* options, double lr, const double* prepared,
                                          double grad_factor) {
    const double weight_decay = options[kWeightDecay];
    const bool late = options[kDecayAfterMomentum] != 0.0;
    return {grad_factor,
            lr,
            options[kMomentum],
            1.0 - options[kDampening],
            late ? 0.0 : weight_decay,
            late ? weight_decay : 0.0,
            options[kMomentum] != 0.0,
            prepared[0] != 0.0,
            options[kNesterov] != 0.0};
  }

  // The branches are the same for a whole tensor: compilers take them out of the loop. Products are
  // rounded before they are added, where torch fuses the two: results differ by that rounding.
  template <typename opmath_t>
  APEX_MP_MATH void update(opmath_t& param, opmath_t* tensors, opmath_t scaled_grad,
                           const SgdFactors<opmath_t>& factors) {
    opmath_t& buffer = tensors[0];
    opmath_t update = scaled_grad * factors.inv_scale + factors.early_decay * param;
    if (factors.has_momentum) {
      buffer = factors.is_fresh ? update
                                : factors.momentum * buffer + factors.one_minus_dampening * update;
      update = factors.nesterov ? update + factors.momentum * buffer : buffer;
    }
    update = update + factors.late_decay * param;
    param = param - factors.lr * update;
  }
};

}  // namespace apex_mp::math

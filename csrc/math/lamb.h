// One step of LAMB (You et al. 2020) for one number: the update of Adam, times the norm of the
// tensor's parameter divided by that of its update.
#pragma once

#include <cmath>

#include "math/adam.h"
#include "math/common.h"
#include "math/rule.h"

namespace apex_mp::math {

template <typename opmath_t>
struct LambFactors {
  opmath_t inv_scale;
  opmath_t l2;  // weight_decay added to the gradient, or 0
  opmath_t beta1;
  opmath_t of_grad;  // 1 - beta1, or 1 without averaging
  opmath_t beta2;
  opmath_t one_minus_beta2;
  opmath_t inv_bias_correction1;
  opmath_t inv_sqrt_bias_correction2;
  opmath_t eps;
  opmath_t decay;      // weight_decay added to the update, or 0
  opmath_t step_size;  // lr * ratio of the norms
};

// The rule of LAMB, see rule.h.
struct Lamb : RuleBase {
  template <typename opmath_t>
  using Factors = LambFactors<opmath_t>;

  static constexpr const char* kName = "lamb";
  static constexpr const char* kSparseAdvice = ", please consider SparseAdam instead";
  static constexpr Option kOptions[] = {
      {"betas", Range::kBelowOne, 2},        {"eps", Range::kNotNegative},
      {"weight_decay", Range::kNotNegative}, {"adam_w_mode", Range::kBool},
      {"bias_correction", Range::kBool},     {"grad_averaging", Range::kBool},
      {"use_nvlamb", Range::kBool}};
  enum { kBeta1, kBeta2, kEps, kWeightDecay, kAdamW, kBiasCorrection, kAveraging, kNvlamb };
  static constexpr int kTensors = 2;   // exp_avg, exp_avg_sq
  static constexpr int kNumbers = 1;   // step
  static constexpr int kPrepared = 3;  // the bias corrections, as of Adam; the ratio of the norms
  static constexpr int kRatio = 2;

  APEX_MP_MATH double prepare(int which, const double* options, const float* numbers,
                              const Norms& norms) {
    if (which != kRatio) {
      return bias_correction(options[kBiasCorrection] != 0.0, options[which], numbers[0] + 1.0f);
    }
    const bool wanted = options[kNvlamb] != 0.0 || options[kWeightDecay] != 0.0;
    return wanted && norms.param > 0.0 && norms.update > 0.0 ? norms.param / norms.update : 1.0;
  }

  APEX_MP_MATH float advance(int, const float* numbers, const double*) { return numbers[0] + 1.0f; }

  APEX_MP_MATH LambFactors<double> factors(const double* options, double lr, const double* prepared,
                                           double grad_factor) {
    const double weight_decay = options[kWeightDecay];
    const bool decoupled = options[kAdamW] != 0.0;
    return {grad_factor,          decoupled ? 0.0 : weight_decay,
            options[kBeta1],      options[kAveraging] != 0.0 ? 1.0 - options[kBeta1] : 1.0,
            options[kBeta2],      1.0 - options[kBeta2],
            1.0 / prepared[0],    1.0 / std::sqrt(prepared[1]),
            options[kEps],        decoupled ? weight_decay : 0.0,
            lr * prepared[kRatio]};
  }

  template <typename opmath_t>
  APEX_MP_MATH opmath_t direction(const opmath_t& param, opmath_t* tensors, opmath_t scaled_grad,
                                  const LambFactors<opmath_t>& factors) {
    using std::sqrt;
    const opmath_t grad = scaled_grad * factors.inv_scale + factors.l2 * param;
    tensors[0] = factors.beta1 * tensors[0] + factors.of_grad * grad;
    tensors[1] = factors.beta2 * tensors[1] + factors.one_minus_beta2 * grad * grad;
    // Corrected after the root, as in adam().
    const opmath_t denom = sqrt(tensors[1]) * factors.inv_sqrt_bias_correction2 + factors.eps;
    return factors.inv_bias_correction1 * tensors[0] / denom + factors.decay * param;
  }

  template <typename opmath_t>
  APEX_MP_MATH void update(opmath_t& param, opmath_t* tensors, opmath_t scaled_grad,
                           const LambFactors<opmath_t>& factors) {
    param = param - factors.step_size * direction(param, tensors, scaled_grad, factors);
  }
};

}  // namespace apex_mp::math

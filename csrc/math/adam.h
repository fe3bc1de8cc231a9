// One Adam step for one number (Kingma & Ba 2015; decoupled decay: Loshchilov & Hutter 2019).
#pragma once

#include <cmath>

#include "math/common.h"
#include "math/rule.h"

namespace apex_mp::math {

// The factors of an update, from options, step count and learning rate; the same for a whole
// tensor.
template <typename opmath_t>
struct AdamFactors {
  opmath_t one_minus_beta1;
  opmath_t beta2;
  opmath_t one_minus_beta2;
  opmath_t inv_sqrt_bias_correction2;
  opmath_t eps_inside;  // eps * bias_correction2; one of the two is zero: the update has no branch
  opmath_t eps_outside;
  opmath_t step_size;  // lr / bias_correction1
  opmath_t keep;       // 1 - lr * weight_decay, or 1 for L2 regularisation
  opmath_t l2;         // weight_decay for L2 regularisation, or 0
  opmath_t inv_scale;
};

// 1 - beta**step, in double, because 1 - beta2 in float is off by 1.3e-5 relative. `step` counts
// this step.
APEX_MP_MATH double bias_correction(bool wanted, double beta, double step) {
  return wanted ? 1.0 - std::pow(beta, step) : 1.0;
}

// The rule of Adam, see rule.h.
struct Adam : RuleBase {
  template <typename opmath_t>
  using Factors = AdamFactors<opmath_t>;

  static constexpr const char* kName = "adam";
  static constexpr const char* kSparseAdvice = ", please consider SparseAdam instead";
  static constexpr Option kOptions[] = {
      {"betas", Range::kBelowOne, 2},        {"eps", Range::kNotNegative},
      {"weight_decay", Range::kNotNegative}, {"adam_w_mode", Range::kBool},
      {"bias_correction", Range::kBool},     {"eps_inside_sqrt", Range::kBool}};
  enum { kBeta1, kBeta2, kEps, kWeightDecay, kAdamW, kBiasCorrection, kEpsInsideSqrt };
  static constexpr int kTensors = 2;   // exp_avg, exp_avg_sq
  static constexpr int kNumbers = 1;   // step
  static constexpr int kPrepared = 2;  // the bias corrections
  static constexpr bool kTakesCodes = true;

  APEX_MP_MATH double prepare(int which, const double* options, const float* numbers,
                              const Norms&) {
    return bias_correction(options[kBiasCorrection] != 0.0, options[which], numbers[0] + 1.0f);
  }

  APEX_MP_MATH float advance(int, const float* numbers, const double*) { return numbers[0] + 1.0f; }

  APEX_MP_MATH AdamFactors<double> factors(const double* options, double lr, const double* prepared,
                                           double grad_factor) {
    const double weight_decay = options[kWeightDecay];
    const bool decoupled = options[kAdamW] != 0.0;       // decay the weight itself
    const bool inside = options[kEpsInsideSqrt] != 0.0;  // sqrt(v + eps) instead of sqrt(v) + eps
    return {1.0 - options[kBeta1],
            options[kBeta2],
            1.0 - options[kBeta2],
            1.0 / std::sqrt(prepared[1]),
            inside ? options[kEps] * prepared[1] : 0.0,
            inside ? 0.0 : options[kEps],
            lr / prepared[0],
            decoupled ? 1.0 - lr * weight_decay : 1.0,
            decoupled ? 0.0 : weight_decay,
            grad_factor};
  }

  template <typename opmath_t>
  APEX_MP_MATH void update(opmath_t& param, opmath_t* tensors, opmath_t scaled_grad,
                           const AdamFactors<opmath_t>& factors) {
    using std::sqrt;
    opmath_t& exp_avg = tensors[0];
    opmath_t& exp_avg_sq = tensors[1];
    const opmath_t grad = scaled_grad * factors.inv_scale + factors.l2 * param;
    exp_avg += factors.one_minus_beta1 * (grad - exp_avg);
    exp_avg_sq = factors.beta2 * exp_avg_sq + factors.one_minus_beta2 * grad * grad;
    // Corrected after the root, as in torch, because exp_avg_sq / bias_correction2 may overflow.
    const opmath_t denom =
        sqrt(exp_avg_sq + factors.eps_inside) * factors.inv_sqrt_bias_correction2 +
        factors.eps_outside;
    param = factors.keep * param - factors.step_size * exp_avg / denom;
  }
};

}  // namespace apex_mp::math

// One Adam step for one number (Kingma & Ba 2015; decoupled decay: Loshchilov & Hutter 2019).
#pragma once

#include <cmath>

#include "math/common.h"
#include "math/rule.h"

namespace apex_mp::math {

struct AdamOptions {
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool adam_w_mode;  // decay the weight itself; otherwise add weight_decay * param to the gradient
  bool bias_correction;  // false: both corrections are 1
  bool eps_inside_sqrt;  // sqrt(v + eps) instead of sqrt(v) + eps
};

// What the update needs of options, step count and learning rate; the same for a whole tensor.
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

APEX_MP_MATH AdamFactors<double> adam_factors(const AdamOptions& options, double lr,
                                              double correction1, double correction2,
                                              double inv_scale) {
  AdamFactors<double> factors;
  factors.one_minus_beta1 = 1.0 - options.beta1;
  factors.beta2 = options.beta2;
  factors.one_minus_beta2 = 1.0 - options.beta2;
  factors.inv_sqrt_bias_correction2 = 1.0 / std::sqrt(correction2);
  factors.eps_inside = options.eps_inside_sqrt ? options.eps * correction2 : 0.0;
  factors.eps_outside = options.eps_inside_sqrt ? 0.0 : options.eps;
  factors.step_size = lr / correction1;
  factors.keep = options.adam_w_mode ? 1.0 - lr * options.weight_decay : 1.0;
  factors.l2 = options.adam_w_mode ? 0.0 : options.weight_decay;
  factors.inv_scale = inv_scale;
  return factors;
}

APEX_MP_MATH AdamFactors<double> adam_factors(const AdamOptions& options, double lr, double step,
                                              double inv_scale) {
  return adam_factors(options, lr, bias_correction(options.bias_correction, options.beta1, step),
                      bias_correction(options.bias_correction, options.beta2, step), inv_scale);
}

// opmath_t is float, double, or a register of numbers that brings operators and sqrt with it.
template <typename opmath_t>
APEX_MP_MATH void adam(opmath_t& param, opmath_t& exp_avg, opmath_t& exp_avg_sq,
                       opmath_t scaled_grad, const AdamFactors<opmath_t>& factors) {
  using std::sqrt;
  const opmath_t grad = scaled_grad * factors.inv_scale + factors.l2 * param;
  exp_avg += factors.one_minus_beta1 * (grad - exp_avg);
  exp_avg_sq = factors.beta2 * exp_avg_sq + factors.one_minus_beta2 * grad * grad;
  // Corrected behind the root, as in torch: exp_avg_sq / bias_correction2 may overflow.
  const opmath_t denom = sqrt(exp_avg_sq + factors.eps_inside) * factors.inv_sqrt_bias_correction2 +
                         factors.eps_outside;
  param = factors.keep * param - factors.step_size * exp_avg / denom;
}

// What the engine asks of Adam, see rule.h.
struct Adam : RuleBase {
  template <typename opmath_t>
  using Factors = AdamFactors<opmath_t>;

  static constexpr const char* kName = "adam";
  static constexpr const char* kSparseAdvice = ", please consider SparseAdam instead";
  static constexpr Option kOptions[] = {
      {"betas", Range::kBelowOne, 2},        {"eps", Range::kNotNegative},
      {"weight_decay", Range::kNotNegative}, {"adam_w_mode", Range::kBool},
      {"bias_correction", Range::kBool},     {"eps_inside_sqrt", Range::kBool}};
  static constexpr int kTensors = 2;   // exp_avg, exp_avg_sq
  static constexpr int kNumbers = 1;   // step
  static constexpr int kPrepared = 2;  // the bias corrections

  APEX_MP_MATH AdamOptions options_of(const double* options) {
    return {options[0],        options[1],        options[2],       options[3],
            options[4] != 0.0, options[5] != 0.0, options[6] != 0.0};
  }

  APEX_MP_MATH double prepare(int which, const double* options, const float* numbers,
                              const Norms&) {
    return bias_correction(options[5] != 0.0, options[which], numbers[0] + 1.0f);
  }

  APEX_MP_MATH float advance(int, const float* numbers, const double*) { return numbers[0] + 1.0f; }

  APEX_MP_MATH AdamFactors<double> factors(const double* options, double lr, const double* prepared,
                                           double grad_factor) {
    return adam_factors(options_of(options), lr, prepared[0], prepared[1], grad_factor);
  }

  template <typename opmath_t>
  APEX_MP_MATH void update(opmath_t& param, opmath_t* tensors, opmath_t grad,
                           const AdamFactors<opmath_t>& factors) {
    adam(param, tensors[0], tensors[1], grad, factors);
  }
};

}  // namespace apex_mp::math

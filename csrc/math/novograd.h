// One step of NovoGrad (Ginsburg et al. 2019) for one number: Adam whose second moment is one
// number for a tensor, from the norm of its gradient. As in apex it is kept as a norm, not as a
// square.
#pragma once

#include <cmath>

#include "math/adam.h"
#include "math/common.h"
#include "math/rule.h"

namespace apex_mp::math {

template <typename opmath_t>
struct NovogradFactors {
  opmath_t inv_scale;  // of the gradient, divided by the norm too if that is inside the moment
  opmath_t l2;         // weight_decay inside the moment, or 0
  opmath_t beta1;
  opmath_t of_grad;    // 1 - beta1, or 1 without averaging
  opmath_t step_size;  // lr / bias correction, divided by the norm if that is outside
  opmath_t keep;       // 1 - lr * weight_decay outside of the moment, or 1
};

// The rule of NovoGrad, see rule.h.
struct Novograd : RuleBase {
  template <typename opmath_t>
  using Factors = NovogradFactors<opmath_t>;

  static constexpr const char* kName = "novograd";
  static constexpr const char* kSparseAdvice = ", please consider SparseAdam instead";
  static constexpr Option kOptions[] = {
      {"betas", Range::kBelowOne, 2},        {"eps", Range::kNotNegative},
      {"weight_decay", Range::kNotNegative}, {"bias_correction", Range::kBool},
      {"reg_inside_moment", Range::kBool},   {"grad_averaging", Range::kBool},
      {"norm_type", Range::kZeroOrTwo},      {"init_zero", Range::kBool}};
  enum {
    kBeta1,
    kBeta2,
    kEps,
    kWeightDecay,
    kBiasCorrection,
    kInside,
    kAveraging,
    kNormType,
    kInitZero
  };
  static constexpr int kTensors = 1;   // exp_avg
  static constexpr int kNumbers = 2;   // step; exp_avg_sq, which is the norm
  static constexpr int kPrepared = 3;  // the bias corrections, as of Adam; the new norm
  static constexpr int kNorm = 2;

  APEX_MP_MATH bool wants_max(const double* options) { return options[kNormType] == 0.0; }

  APEX_MP_MATH double prepare(int which, const double* options, const float* numbers,
                              const Norms& norms) {
    const double beta2 = options[kBeta2];
    const double last = numbers[1];
    if (which != kNorm) {
      return bias_correction(options[kBiasCorrection] != 0.0, options[which], numbers[0] + 1.0f);
    }
    if (numbers[0] == 0.0f && options[kInitZero] == 0.0) return norms.grad;
    if (wants_max(options)) return beta2 * last + (1.0 - beta2) * norms.grad;
    return std::sqrt(beta2 * last * last + (1.0 - beta2) * norms.grad * norms.grad);
  }

  APEX_MP_MATH float advance(int which, const float* numbers, const double* prepared) {
    return which == 0 ? numbers[0] + 1.0f : static_cast<float>(prepared[kNorm]);
  }

  APEX_MP_MATH NovogradFactors<double> factors(const double* options, double lr,
                                               const double* prepared, double grad_factor) {
    const double norm = prepared[kNorm] / std::sqrt(prepared[1]) + options[kEps];
    const bool inside = options[kInside] != 0.0;
    const double weight_decay = options[kWeightDecay];
    const double step_size = lr / prepared[0];
    return {inside ? grad_factor / norm : grad_factor,
            inside ? weight_decay : 0.0,
            options[kBeta1],
            options[kAveraging] != 0.0 ? 1.0 - options[kBeta1] : 1.0,
            inside ? step_size : step_size / norm,
            inside ? 1.0 : 1.0 - lr * weight_decay};
  }

  template <typename opmath_t>
  APEX_MP_MATH void update(opmath_t& param, opmath_t* tensors, opmath_t scaled_grad,
                           const NovogradFactors<opmath_t>& factors) {
    const opmath_t grad = scaled_grad * factors.inv_scale + factors.l2 * param;
    tensors[0] = factors.beta1 * tensors[0] + factors.of_grad * grad;
    param = factors.keep * param - factors.step_size * tensors[0];
  }
};

}  // namespace apex_mp::math

// One step of Adagrad for one number (Duchi, Hazan & Singer 2011).
#pragma once

#include <cmath>

#include "math/common.h"
#include "math/rule.h"

namespace apex_mp::math {

template <typename opmath_t>
struct AdagradFactors {
  opmath_t inv_scale;
  opmath_t l2;  // weight_decay for L2 regularisation, or 0
  opmath_t eps;
  opmath_t lr;
  opmath_t keep;  // 1 - lr * weight_decay, or 1 for L2 regularisation
};

// The rule of Adagrad, see rule.h.
struct Adagrad : RuleBase {
  template <typename opmath_t>
  using Factors = AdagradFactors<opmath_t>;

  static constexpr const char* kName = "adagrad";
  static constexpr Option kOptions[] = {{"eps", Range::kNotNegative},
                                        {"weight_decay", Range::kNotNegative},
                                        {"adagrad_w_mode", Range::kBool}};
  static constexpr int kTensors = 1;  // sum

  APEX_MP_MATH AdagradFactors<double> factors(const double* options, double lr, const double*,
                                              double grad_factor) {
    const double weight_decay = options[1];
    const bool decoupled = options[2] != 0.0;
    return {grad_factor, decoupled ? 0.0 : weight_decay, options[0], lr,
            decoupled ? 1.0 - lr * weight_decay : 1.0};
  }

  template <typename opmath_t>
  APEX_MP_MATH void update(opmath_t& param, opmath_t* tensors, opmath_t scaled_grad,
                           const AdagradFactors<opmath_t>& factors) {
    using std::sqrt;
    const opmath_t grad = scaled_grad * factors.inv_scale + factors.l2 * param;
    tensors[0] += grad * grad;
    param = factors.keep * param - factors.lr * grad / (sqrt(tensors[0]) + factors.eps);
  }
};

}  // namespace apex_mp::math

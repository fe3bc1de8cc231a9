// All rules, see math/rule.h.
#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "math/adagrad.h"
#include "math/adam.h"
#include "math/lamb.h"
#include "math/novograd.h"
#include "math/sgd.h"

namespace apex_mp::math {

// The most state tensors, numbers and prepared numbers of any rule.
constexpr int kMaxTensors = 2;
constexpr int kMaxNumbers = 2;
constexpr int kMaxPrepared = 3;

// The constants of a rule.
struct RuleFacts {
  const char* name;
  const char* sparse_advice;
  const Option* options;
  int option_count;
  int tensors;
  int numbers;
  bool needs_numbers;
  bool counts_steps;
  bool takes_norms;  // of gradients
  bool takes_ratio;
  bool takes_codes;
  int (*tensors_with)(const double* options);
};

// Whether a step with these options needs the maximum norm of each gradient.
template <typename Rule>
APEX_MP_MATH bool wants_max(const double* options) {
  if constexpr (Rule::kNorm >= 0) return Rule::wants_max(options);
  return false;
}

// Whether the first number of state is the count of steps.
template <typename Rule>
constexpr bool kCountsSteps = Rule::kNeedsNumbers && Rule::kNumbers > 0;

template <typename... Rules>
struct RuleList {
  static constexpr int kCount = sizeof...(Rules);
  static_assert(((Rules::kTensors <= kMaxTensors && Rules::kNumbers <= kMaxNumbers &&
                  Rules::kPrepared <= kMaxPrepared) &&
                 ...));
  static constexpr int kMaxOptions = []() {
    int most = 0;
    ((most = count_options<Rules>() > most ? count_options<Rules>() : most), ...);
    return most;
  }();

  // Lists of factors in double, one for each rule.
  using FactorsOfEach = std::tuple<std::vector<typename Rules::template Factors<double>>...>;

  template <typename Rule>
  static constexpr int32_t number() {
    int32_t found = 0;
    int32_t here = 0;
    ((found = std::is_same_v<Rule, Rules> ? here : found, ++here), ...);
    return found;
  }

  static const RuleFacts& facts(int32_t number) {
    static const RuleFacts kFacts[] = {{Rules::kName, Rules::kSparseAdvice, Rules::kOptions,
                                        sizeof(Rules::kOptions) / sizeof(Option), Rules::kTensors,
                                        Rules::kNumbers, Rules::kNeedsNumbers, kCountsSteps<Rules>,
                                        Rules::kNorm >= 0, Rules::kRatio >= 0, Rules::kTakesCodes,
                                        &tensors_with<Rules>}...};
    return kFacts[number];
  }

  // GCOVR_EXCL_START: of files that have the same copies of these, gcov counts one that never runs.
  template <typename Rule>
  static int tensors_with(const double* options) {
    if constexpr (!Rule::kAllTensors) return Rule::tensors(options);
    return Rule::kTensors;
  }
  // GCOVR_EXCL_STOP

  // Calls body(rule) for rule number `wanted`.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
  template <typename Body>
  APEX_MP_MATH void with(int32_t wanted, const Body& body) {
    int32_t number = 0;
    ((number++ == wanted ? body(Rules{}) : void()), ...);
  }
};

using AllRules = RuleList<Adam, Sgd, Adagrad, Novograd, Lamb>;

constexpr int kMaxOptions = AllRules::kMaxOptions;
}  // namespace apex_mp::math

// The loops of a block over the numbers of its chunk: sums of squares, and the steps of optimizers.
// For the kernels of check_, unscale_, exponents_ and of both passes of the step.
#pragma once

#include "cuda/table.h"
#include "cuda/vectors.h"
#include "math/check.h"
#include "math/rounding.h"
#include "math/rules.h"
#include "math/unscale.h"

namespace apex_mp::cuda {

// Bit i is set if an aligned vector begins at number i, of the first kWidth numbers.
template <uint32_t kWidth>
__device__ uint32_t aligned_heads(const Array& array) {
  const int64_t bytes = size_of(array.dtype);
  const uint32_t shift = bytes == 8 ? 3 : bytes == 4 ? 2 : 1;
  const uint32_t period = bytes == 2 ? kWidth : 16u >> shift;  // from one such number to the next
  const uint32_t each_period = bytes == 8 ? 0x55u : bytes == 4 ? 0x11u : 0x01u;
  const auto number = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(array.data) >> shift);
  return each_period << ((0u - number) & (period - 1u));
}

// common_head() of launch_plan.h for the device: gradients move, so their alignment is known only
// here. In double math every number is a vector.
template <int kArrays>
__device__ int32_t head_of(const Part<kArrays>& part) {
  if (part.double_math) return 0;
  constexpr uint32_t kWidth = kVector<float, kArrays>;
  uint32_t heads = (1u << kWidth) - 1u;
#pragma unroll
  for (const Array& array : part.arrays) {
    if (array.data != nullptr) heads &= aligned_heads<kWidth>(array);
  }
  return __ffs(static_cast<int>(heads)) - 1;
}

// Sums squares again, in double: finite floats of 2e19 and more have no finite square in float.
// This is rare, so numbers are not kept but loaded again, vector by vector.
template <typename opmath_t, DType dtype, int kWidth, int kCount>
__device__ double wide_sum_sq(const char* data, int index, Span<kWidth, kCount> span,
                              int32_t& found_inf) {
  double sum_sq = 0.0;
#pragma unroll 1
  for (int vector = 0; vector < kCount; ++vector) {
    opmath_t grad[kWidth];
    read_as<dtype>(data, index + vector * span.kStride, Span<kWidth, 1>{}, grad);
#pragma unroll
    for (const opmath_t number : grad) math::check(static_cast<double>(number), sum_sq, found_inf);
  }
  return sum_sq;
}

// Numbers are checked one by one only if their sum is not finite: inf and NaN have no finite
// square, and a sum of squares that has become inf or NaN stays so.
template <typename opmath_t, DType dtype, int kWidth, int kCount>
__device__ double sum_vectors(const char* data, int index, Span<kWidth, kCount> span,
                              int32_t& found_inf) {
  opmath_t grad[span];
  read_as<dtype>(data, index, span, grad);
  opmath_t sum_sq = 0;
#pragma unroll
  for (int vector = 0; vector < kCount; ++vector) {
    opmath_t of_vector = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const opmath_t number = grad[vector * kWidth + i];
      of_vector += number * number;
    }
    sum_sq += of_vector;
  }
  if (!math::not_finite(sum_sq)) return static_cast<double>(sum_sq);
  return wide_sum_sq<opmath_t, dtype>(data, index, span, found_inf);
}

// Returns this thread's share of the sum of squares. The dtype is a template argument, which saves
// a branch for every vector.
template <typename opmath_t, DType dtype>
__device__ double sum_squares_of(const Part<1>& part, int32_t& found_inf) {
  constexpr int kBytes = static_cast<int>(size_of(dtype));
  constexpr int kWidth = kBytes == 8 ? 1 : 16 / kBytes;
  constexpr int kCount = kBytes == 8 ? 1 : APEX_MP_READ_VECTORS;
  const char* data = static_cast<const char*>(part.arrays[0].data);
  double total = 0.0;
  walk_vectors<kWidth, kCount>(part, [&](int index, auto span) {
    total += sum_vectors<opmath_t, dtype>(data, index, span, found_inf);
  });
  return total;
}

__device__ inline double sum_squares(const Part<1>& part, int32_t& found_inf) {
  switch (part.arrays[0].dtype) {
    case DType::kHalf:
      return sum_squares_of<float, DType::kHalf>(part, found_inf);
    case DType::kBFloat16:
      return sum_squares_of<float, DType::kBFloat16>(part, found_inf);
    case DType::kFloat:
      return sum_squares_of<float, DType::kFloat>(part, found_inf);
    default:
      return sum_squares_of<double, DType::kDouble>(part, found_inf);
  }
}

// Where unscaled gradients are written, which may be where they were read.
template <typename opmath_t>
struct UnscaledGrad {
  Array array;  // data == nullptr: nowhere
  opmath_t inv_scale;
};

// As unscale_ computes it: a gradient that is not double has a float factor, in double math too.
template <typename opmath_t>
__device__ UnscaledGrad<opmath_t> unscaled_grad(const Array& array, double inv_scale) {
  if (array.dtype == DType::kDouble) return {array, static_cast<opmath_t>(inv_scale)};
  return {array, static_cast<float>(inv_scale)};
}

template <typename opmath_t, int width, typename SpanOf>
__device__ void write_unscaled(const opmath_t (&grad)[width],
                               const UnscaledGrad<opmath_t>& unscaled, int index, SpanOf span) {
  if (unscaled.array.data == nullptr) return;
  opmath_t numbers[width];
  int32_t found_inf = 0;  // A step that is taken has finite gradients, or was not checked.
#pragma unroll
  for (int i = 0; i < width; ++i) {
    numbers[i] = math::unscale(grad[i], unscaled.inv_scale, found_inf);
  }
  store(numbers, unscaled.array, index, span);
}

// Arrays: param, grad, copy, and the tensors of the rule's state. The copy may be a remainder.
template <typename Rule>
using PartOf = Part<3 + Rule::kTensors>;

// Numbers are squared in double only if they have no finite squares in float: see wide_sum_sq().
template <typename opmath_t, int width>
__device__ double sum_sq_of(const opmath_t (&numbers)[width]) {
  opmath_t sum = 0;
#pragma unroll
  for (const opmath_t number : numbers) sum += number * number;
  if constexpr (sizeof(opmath_t) == sizeof(float)) {
    if (math::not_finite(sum)) {
      double wide = 0.0;
#pragma unroll
      for (const double number : numbers) wide += number * number;
      return wide;
    }
  }
  return sum;
}

// This thread's share; nothing is written. What is read here is soon read again.
template <typename Rule, typename opmath_t>
__device__ math::Measured measure_numbers(
    const PartOf<Rule>& part, const typename Rule::template Factors<opmath_t>& factors) {
  static_assert(Rule::kAllTensors);
  const Array& param = part.arrays[0];
  const Array& grad = part.arrays[1];
  const Array& copy = part.arrays[2];
  const Array* state = part.arrays + 3;
  math::Measured total = {0.0, 0.0};
  walk<opmath_t>(part, [&](int index, auto span) {
    const auto raw_param = load<opmath_t>(param, index, span);
    const auto raw_rest = load_beside<opmath_t>(copy, part.copy_counts, index, span);
    const auto raw_grad = load<opmath_t>(grad, index, span);
    Raw<opmath_t, span> raw_state[Rule::kTensors];
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) {
      raw_state[i] = load<opmath_t>(state[i], index, span);
    }
    opmath_t p[span];
    opmath_t g[span];
    opmath_t tensors[Rule::kTensors][span];
    widen(raw_param, param.dtype, p);
    find_masters(raw_rest, param, copy, part.copy_counts, p);
    widen(raw_grad, grad.dtype, g);
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) widen(raw_state[i], state[i].dtype, tensors[i]);
#pragma unroll
    for (int n = 0; n < span; ++n) {
      opmath_t numbers[Rule::kTensors];
#pragma unroll
      for (int i = 0; i < Rule::kTensors; ++i) numbers[i] = tensors[i][n];
      g[n] = Rule::direction(p[n], numbers, g[n], factors);
    }
    total.param += sum_sq_of(p);
    total.update += sum_sq_of(g);
  });
  return total;
}

// How a part's state is rounded if it is in bfloat16, and where the part begins in its row, modulo
// 2**32.
struct StateRounding {
  math::Rounding rounding;
  uint32_t first;
};

// Rounds state in bfloat16, so that store() stores the numbers unchanged.
template <typename Rule, typename opmath_t, int kWidth, int kCount>
__device__ void round_state(opmath_t (&tensors)[Rule::kTensors][kWidth * kCount],
                            const StateRounding& how, int index, Span<kWidth, kCount> span) {
  if (!how.rounding.is_stochastic) return;
#pragma unroll
  for (int n = 0; n < span; ++n) {
    const uint32_t element = how.first + index + n / kWidth * span.kStride + n % kWidth;
    const uint32_t random = math::random_bits(element, how.rounding);
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) {
      const auto number = static_cast<float>(tensors[i][n]);
      const uint32_t bits =
          math::bfloat16_bits(math::bits_of(number), number != number, math::half_for(i, random));
      tensors[i][n] = math::from_bits(bits << 16, 0.0f);
    }
  }
}

// `cache` is for parameter and state only: the gradient is in the cache already, and the next
// forward pass reads the copy.
template <typename Rule, Cache cache, typename opmath_t>
__device__ void step_numbers(const PartOf<Rule>& part,
                             const typename Rule::template Factors<opmath_t>& factors,
                             const UnscaledGrad<opmath_t>& unscaled,
                             const StateRounding& rounding) {
  const Array& param = part.arrays[0];
  const Array& grad = part.arrays[1];
  const Array& copy = part.arrays[2];
  const Array* state = part.arrays + 3;
  const auto is_there = [&](int i) { return Rule::kAllTensors || state[i].data != nullptr; };
  walk<opmath_t>(part, [&](int index, auto span) {
    const auto raw_param = load<opmath_t, cache>(param, index, span);
    const auto raw_rest = load_beside<opmath_t, cache>(copy, part.copy_counts, index, span);
    const auto raw_grad = load<opmath_t>(grad, index, span);
    Raw<opmath_t, span> raw_state[Rule::kTensors];
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) {
      if (!Rule::kAllTensors) raw_state[i] = {};
      if (is_there(i)) raw_state[i] = load<opmath_t, cache>(state[i], index, span);
    }
    opmath_t p[span];
    opmath_t g[span];
    opmath_t tensors[Rule::kTensors][span];
    widen(raw_param, param.dtype, p);
    find_masters(raw_rest, param, copy, part.copy_counts, p);
    widen(raw_grad, grad.dtype, g);
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) widen(raw_state[i], state[i].dtype, tensors[i]);
    write_unscaled(g, unscaled, index, span);
#pragma unroll
    for (int n = 0; n < span; ++n) {
      opmath_t numbers[Rule::kTensors];
#pragma unroll
      for (int i = 0; i < Rule::kTensors; ++i) numbers[i] = tensors[i][n];
      Rule::update(p[n], numbers, g[n], factors);
#pragma unroll
      for (int i = 0; i < Rule::kTensors; ++i) tensors[i][n] = numbers[i];
    }
    if (copy.dtype == DType::kRemainder) {
      store_split<cache>(p, param, copy, index, span);
    } else {
      store<cache>(p, param, index, span);
      if (copy.data != nullptr) store(p, copy, index, span);
    }
    if constexpr (math::kCountsSteps<Rule>) {
      if (state[0].dtype == DType::kBFloat16) round_state<Rule>(tensors, rounding, index, span);
    }
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) {
      if (is_there(i)) store<cache>(tensors[i], state[i], index, span);
    }
  });
}

}  // namespace apex_mp::cuda

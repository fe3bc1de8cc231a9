// What a block does with the numbers of its chunk: sums of squares, Adam, and SGD.
#pragma once

#include "cuda/table.h"
#include "cuda/vectors.h"
#include "math/adam.h"
#include "math/check.h"
#include "math/sgd.h"
#include "math/unscale.h"

namespace apex_mp::cuda {

// Of the first eight numbers, bit i is set if 16 bytes begin at number i.
__device__ inline uint32_t aligned_heads(const Array& array) {
  const int64_t bytes = size_of(array.dtype);
  const uint32_t shift = bytes == 8 ? 3 : bytes == 4 ? 2 : 1;
  const uint32_t period = 16u >> shift;
  const uint32_t each_period = bytes == 8 ? 0x55u : bytes == 4 ? 0x11u : 0x01u;
  const auto number = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(array.data) >> shift);
  return each_period << ((0u - number) & (period - 1u));
}

// What common_head() of launch_plan.h says, for the device: gradients move, so that their alignment
// is known only here. In double math every number is a vector.
template <int kArrays>
__device__ int32_t head_of(const Part<kArrays>& part) {
  if (part.double_math) return 0;
  uint32_t heads = 0xffu;
#pragma unroll
  for (const Array& array : part.arrays) {
    if (array.data != nullptr) heads &= aligned_heads(array);
  }
  return __ffs(static_cast<int>(heads)) - 1;
}

// Finite floats of 2e19 and more have no finite square in float; they do in double.
template <typename opmath_t, int width>
__device__ double wide_sum_sq(const opmath_t (&grad)[width]) {
  double sum_sq = 0.0;
  int32_t found_inf = 0;
#pragma unroll
  for (const opmath_t number : grad) math::check(static_cast<double>(number), sum_sq, found_inf);
  return sum_sq;
}

// This thread's share of the sum of squares.
template <typename opmath_t>
__device__ double sum_squares(const Part<1>& part, int32_t& found_inf) {
  double total = 0.0;
  walk<opmath_t>(part, [&](int index, auto width) {
    opmath_t grad[width];
    read(part.arrays[0], index, grad);
    opmath_t sum_sq = 0;
#pragma unroll
    for (const opmath_t number : grad) math::check(number, sum_sq, found_inf);
    total += math::not_finite(sum_sq) ? wide_sum_sq(grad) : static_cast<double>(sum_sq);
  });
  return total;
}

// Where unscaled gradients are written, which may be where they were read.
template <typename opmath_t>
struct UnscaledGrad {
  Array array;  // data == nullptr: nowhere
  opmath_t inv_scale;
};

// As unscale_ computes it: in double math, too, the factor of a gradient that is no double is
// float.
template <typename opmath_t>
__device__ UnscaledGrad<opmath_t> unscaled_grad(const Array& array, double inv_scale) {
  if (array.dtype == DType::kDouble) return {array, static_cast<opmath_t>(inv_scale)};
  return {array, static_cast<float>(inv_scale)};
}

template <typename opmath_t, int width>
__device__ void write_unscaled(const opmath_t (&grad)[width],
                               const UnscaledGrad<opmath_t>& unscaled, int index) {
  if (unscaled.array.data == nullptr) return;
  opmath_t numbers[width];
  int32_t found_inf = 0;  // A step that is taken has finite gradients, or nobody asked.
#pragma unroll
  for (int i = 0; i < width; ++i) {
    numbers[i] = math::unscale(grad[i], unscaled.inv_scale, found_inf);
  }
  store(numbers, unscaled.array, index);
}

// Arrays: param, grad, exp_avg, exp_avg_sq, copy. `cache` is that of parameter and moments: the
// gradient was read shortly before, and the copy is what the next forward pass reads.
template <Cache cache, typename opmath_t>
__device__ void adam_numbers(const Part<5>& part, const math::AdamFactors<opmath_t>& factors,
                             const UnscaledGrad<opmath_t>& unscaled) {
  const Array& param = part.arrays[0];
  const Array& grad = part.arrays[1];
  const Array& exp_avg = part.arrays[2];
  const Array& exp_avg_sq = part.arrays[3];
  const Array& copy = part.arrays[4];
  walk<opmath_t>(part, [&](int index, auto width) {
    const auto raw_param = load<opmath_t, width, cache>(param, index);
    const auto raw_grad = load<opmath_t, width>(grad, index);
    const auto raw_avg = load<opmath_t, width, cache>(exp_avg, index);
    const auto raw_avg_sq = load<opmath_t, width, cache>(exp_avg_sq, index);
    opmath_t p[width];
    opmath_t g[width];
    opmath_t avg[width];
    opmath_t avg_sq[width];
    widen(raw_param, param.dtype, p);
    widen(raw_grad, grad.dtype, g);
    widen(raw_avg, exp_avg.dtype, avg);
    widen(raw_avg_sq, exp_avg_sq.dtype, avg_sq);
    write_unscaled(g, unscaled, index);
#pragma unroll
    for (int i = 0; i < width; ++i) math::adam(p[i], avg[i], avg_sq[i], g[i], factors);
    store<cache>(p, param, index);
    store<cache>(avg, exp_avg, index);
    store<cache>(avg_sq, exp_avg_sq, index);
    if (copy.data != nullptr) store(p, copy, index);
  });
}

// Arrays: param, grad, momentum_buffer, copy, unscaled gradient.
template <typename opmath_t>
__device__ void sgd_numbers(const Part<5>& part, const math::SgdFactors<opmath_t>& factors,
                            double unscale_factor) {
  const Array& param = part.arrays[0];
  const Array& grad = part.arrays[1];
  const Array& buffer = part.arrays[2];
  const Array& copy = part.arrays[3];
  const auto unscaled = unscaled_grad<opmath_t>(part.arrays[4], unscale_factor);
  walk<opmath_t>(part, [&](int index, auto width) {
    const auto raw_param = load<opmath_t, width>(param, index);
    const auto raw_grad = load<opmath_t, width>(grad, index);
    Raw<opmath_t, width> raw_moving = {};
    if (buffer.data != nullptr) raw_moving = load<opmath_t, width>(buffer, index);
    opmath_t p[width];
    opmath_t g[width];
    opmath_t moving[width];
    widen(raw_param, param.dtype, p);
    widen(raw_grad, grad.dtype, g);
    widen(raw_moving, buffer.dtype, moving);
    write_unscaled(g, unscaled, index);
#pragma unroll
    for (int i = 0; i < width; ++i) math::sgd(p[i], moving[i], g[i], factors);
    store(p, param, index);
    if (buffer.data != nullptr) store(moving, buffer, index);
    if (copy.data != nullptr) store(p, copy, index);
  });
}

}  // namespace apex_mp::cuda

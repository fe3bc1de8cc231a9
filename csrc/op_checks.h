// The checks of each operator, shared by its CPU and its CUDA implementation.
#pragma once

#include <ATen/core/List.h>

#include <optional>

#include "checks.h"
#include "math/exponent.h"
#include "math/update_scale.h"

namespace apex_mp {

// Checks the sums of squares of a list, of which each tensor has a place.
inline void check_sums(const char* op, const char* list, size_t count, at::IntArrayRef places,
                       const at::Tensor& sum_sq, const at::Device& device) {
  check_device({op, "sum_sq"}, sum_sq, device);
  check_dtype({op, "sum_sq"}, sum_sq, {at::kDouble});
  check_dense({op, "sum_sq"}, sum_sq);
  check_writable({op, "sum_sq"}, sum_sq);
  check_same_length(op, list, count, "places", places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    TORCH_CHECK(0 <= places[i] && places[i] < sum_sq.numel(), op, ": places[", i, "] is ",
                places[i], "; it must be an index into sum_sq, which has ", sum_sq.numel(),
                " elements");
    TORCH_CHECK(i == 0 || places[i - 1] < places[i], op, ": places[", i, "] is ", places[i],
                "; it must be more than the one before it, ", places[i - 1]);
  }
}

inline void check_check(at::TensorList grads, at::IntArrayRef places, const at::Tensor& found_inf,
                        const at::Tensor& sum_sq) {
  const char* op = "check_";
  const at::Device device = found_inf.device();
  check_one_element({op, "found_inf"}, found_inf, device, {at::kFloat});
  check_writable({op, "found_inf"}, found_inf);
  check_sums(op, "grads", grads.size(), places, sum_sq, device);
  for (int64_t i = 0; i < static_cast<int64_t>(grads.size()); ++i) {
    check_element({op, "grads", i}, grads[i], device);
  }
}

inline void check_unscale(at::TensorList src, at::TensorList dst, const at::Tensor& inv_scale,
                          const at::Tensor& found_inf, at::IntArrayRef places,
                          const std::optional<at::Tensor>& sum_sq) {
  const char* op = "unscale_";
  const at::Device device = found_inf.device();
  check_one_element({op, "found_inf"}, found_inf, device, {at::kFloat});
  check_writable({op, "found_inf"}, found_inf);
  check_number({op, "inv_scale"}, inv_scale, device);
  if (sum_sq.has_value()) check_sums(op, "src", src.size(), places, *sum_sq, device);
  check_same_length(op, "dst", dst.size(), "src", src.size());
  for (int64_t i = 0; i < static_cast<int64_t>(src.size()); ++i) {
    check_element({op, "src", i}, src[i], device);
    check_element({op, "dst", i}, dst[i], device);
    check_same_layout({op, "dst", i}, dst[i], {op, "src", i}, src[i]);
    check_same_or_apart({op, "dst", i}, dst[i], {op, "src", i}, src[i]);
    check_writable({op, "dst", i}, dst[i]);
  }
}

inline void check_axpby(at::TensorList x, at::TensorList y, at::TensorList out, const at::Tensor& a,
                        const at::Tensor& b, const at::Tensor& found_inf, int64_t tested) {
  const char* op = "axpby_";
  const at::Device device = found_inf.device();
  check_one_element({op, "found_inf"}, found_inf, device, {at::kFloat});
  check_writable({op, "found_inf"}, found_inf);
  check_number({op, "a"}, a, device);
  check_number({op, "b"}, b, device);
  TORCH_CHECK(-1 <= tested && tested <= 1, op, ": tested is ", tested,
              "; it must be -1 (both), 0 (x) or 1 (y)");
  check_same_length(op, "y", y.size(), "x", x.size());
  check_same_length(op, "out", out.size(), "x", x.size());
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()); ++i) {
    check_element({op, "x", i}, x[i], device);
    check_element({op, "y", i}, y[i], device);
    check_element({op, "out", i}, out[i], device);
    check_same_layout({op, "y", i}, y[i], {op, "x", i}, x[i]);
    check_same_layout({op, "out", i}, out[i], {op, "x", i}, x[i]);
    check_same_or_apart({op, "out", i}, out[i], {op, "x", i}, x[i]);
    check_same_or_apart({op, "out", i}, out[i], {op, "y", i}, y[i]);
    check_writable({op, "out", i}, out[i]);
  }
}

inline void check_exponents(at::TensorList tensors, const at::Tensor& counts) {
  const char* op = "exponents_";
  const at::Device device = counts.device();
  check_dtype({op, "counts"}, counts, {at::kLong});
  check_dense({op, "counts"}, counts);
  const auto rows = static_cast<int64_t>(tensors.size());
  TORCH_CHECK(counts.dim() == 2 && counts.size(0) == rows &&
                  counts.size(1) == math::kExponentBins && counts.is_contiguous(),
              op, ": counts has sizes ", counts.sizes(), " and strides ", counts.strides(),
              "; it must be contiguous, of ", rows, " rows, one for each tensor, and ",
              math::kExponentBins, " columns");
  for (int64_t i = 0; i < rows; ++i) check_element({op, "tensors", i}, tensors[i], device);
}

inline void check_loss_scale(const char* op, const at::Tensor& state, const at::Device& device) {
  check_device({op, "state"}, state, device);
  check_dtype({op, "state"}, state, {at::kFloat});
  check_dense({op, "state"}, state);
  check_has_memory({op, "state"}, state);
  static_assert(sizeof(math::LossScaleState) == 3 * sizeof(float));
  TORCH_CHECK(state.numel() == 3, op, ": state has ", state.numel(),
              " elements; it must have 3, the scale and the bits of two int32 counts");
}

inline void check_update_scale(const at::Tensor& state, const at::Tensor& found_inf) {
  const char* op = "update_scale_";
  check_loss_scale(op, state, state.device());
  check_writable({op, "state"}, state);
  check_one_element({op, "found_inf"}, found_inf, state.device(), {at::kFloat});
}

inline void check_option(const char* op, const char* name, double value, bool fits,
                         const char* wish) {
  TORCH_CHECK(fits, op, ": ", name, " is ", value, "; it must be ", wish);
}

// Returns the constants of a loss scale, which Python gives in the order of
// `apex_mp.loss_scale.Rule`. A comparison with NaN is false, so NaN fits nowhere.
inline math::LossScaleRule checked_rule(const char* op, at::ArrayRef<double> rule) {
  TORCH_CHECK(rule.size() == 6, op, ": rule has ", rule.size(), " numbers; it must have 6");
  const double growth = rule[0], backoff = rule[1], interval = rule[2];
  const double low = rule[3], high = rule[4], hysteresis = rule[5];
  constexpr double kMaxCount = 2147483647.0;
  const char* count = "at least 1 and fit an int";
  check_option(op, "growth_factor", growth, growth >= 1.0, "at least 1");
  check_option(op, "backoff_factor", backoff, 0.0 < backoff && backoff < 1.0, "between 0 and 1");
  check_option(op, "growth_interval", interval, 1.0 <= interval && interval <= kMaxCount, count);
  check_option(op, "min_scale", low, low > 0.0, "more than 0");
  check_option(op, "max_scale", high, high >= low, "min_scale or more");
  check_option(op, "hysteresis", hysteresis, 1.0 <= hysteresis && hysteresis <= kMaxCount, count);
  return {growth, backoff, low, high, static_cast<int>(interval), static_cast<int>(hysteresis)};
}

}  // namespace apex_mp

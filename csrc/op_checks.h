// The checks of each operator, shared by its CPU and its CUDA implementation.
#pragma once

#include <ATen/core/List.h>

#include <optional>

#include "checks.h"
#include "math/exponent.h"
#include "math/update_scale.h"

namespace apex_mp {

inline void check_check(at::TensorList grads, at::IntArrayRef groups, const at::Tensor& found_inf,
                        const at::Tensor& sum_sq) {
  const char* op = "check_";
  const at::Device device = found_inf.device();
  check_one_element({op, "found_inf"}, found_inf, device, {at::kFloat});
  check_device({op, "sum_sq"}, sum_sq, device);
  check_dtype({op, "sum_sq"}, sum_sq, {at::kDouble});
  check_dense({op, "sum_sq"}, sum_sq);
  check_writable({op, "found_inf"}, found_inf);
  check_writable({op, "sum_sq"}, sum_sq);
  check_same_length(op, "grads", grads.size(), "groups", groups.size());
  for (int64_t i = 0; i < static_cast<int64_t>(grads.size()); ++i) {
    check_element({op, "grads", i}, grads[i], device);
    TORCH_CHECK(0 <= groups[i] && groups[i] < sum_sq.numel(), op, ": groups[", i, "] is ",
                groups[i], "; it must be an index into sum_sq, which has ", sum_sq.numel(),
                " elements");
  }
}

// Checks a vector with a number for each tensor of a list.
inline void check_vector(const Argument& argument, const at::Tensor& vector,
                         const at::Device& device, std::initializer_list<at::ScalarType> dtypes,
                         const char* list, size_t count) {
  check_device(argument, vector, device);
  check_dtype(argument, vector, dtypes);
  check_dense(argument, vector);
  check_writable(argument, vector);
  TORCH_CHECK(vector.numel() == static_cast<int64_t>(count), argument, " has ", vector.numel(),
              " elements, ", list, " has ", count, " tensors; they must match");
}

inline void check_unscale(at::TensorList src, at::TensorList dst, const at::Tensor& inv_scale,
                          const at::Tensor& found_inf, const std::optional<at::Tensor>& sum_sq) {
  const char* op = "unscale_";
  const at::Device device = found_inf.device();
  check_one_element({op, "found_inf"}, found_inf, device, {at::kFloat});
  check_writable({op, "found_inf"}, found_inf);
  check_number({op, "inv_scale"}, inv_scale, device);
  check_same_length(op, "dst", dst.size(), "src", src.size());
  if (sum_sq.has_value()) {
    check_vector({op, "sum_sq"}, *sum_sq, device, {at::kDouble}, "src", src.size());
  }
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

inline void check_l2_norm(at::TensorList tensors, const at::Tensor& norm,
                          const std::optional<at::Tensor>& norms) {
  const char* op = "l2_norm_";
  const at::Device device = norm.device();
  check_one_element({op, "norm"}, norm, device, {at::kFloat, at::kDouble});
  check_writable({op, "norm"}, norm);
  if (norms.has_value()) {
    check_vector({op, "norms"}, *norms, device, {at::kFloat, at::kDouble}, "tensors",
                 tensors.size());
  }
  for (int64_t i = 0; i < static_cast<int64_t>(tensors.size()); ++i) {
    check_element({op, "tensors", i}, tensors[i], device);
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

inline void check_update_scale(const at::Tensor& scale, const at::Tensor& good_steps,
                               const at::Tensor& overflows, const at::Tensor& found_inf,
                               int64_t growth_interval, int64_t hysteresis) {
  const char* op = "update_scale_";
  const at::Device device = scale.device();
  check_one_element({op, "scale"}, scale, device, {at::kFloat});
  check_one_element({op, "good_steps"}, good_steps, device, {at::kInt});
  check_one_element({op, "overflows"}, overflows, device, {at::kInt});
  check_writable({op, "scale"}, scale);  // The others are integers, which have no gradient.
  check_one_element({op, "found_inf"}, found_inf, device, {at::kFloat});
  constexpr int64_t kMaxCount = 2147483647;
  TORCH_CHECK(1 <= growth_interval && growth_interval <= kMaxCount, op, ": growth_interval is ",
              growth_interval, "; it must be at least 1 and fit an int");
  TORCH_CHECK(1 <= hysteresis && hysteresis <= kMaxCount, op, ": hysteresis is ", hysteresis,
              "; it must be at least 1 and fit an int");
}

inline void check_option(const char* op, const char* name, double value, bool fits,
                         const char* wish) {
  TORCH_CHECK(fits, op, ": ", name, " is ", value, "; it must be ", wish);
}

// A comparison with NaN is false, so NaN fits nowhere.
inline void check_rule(const math::LossScaleRule& rule) {
  const char* op = "update_scale_";
  check_option(op, "growth_factor", rule.growth_factor, rule.growth_factor >= 1.0, "at least 1");
  check_option(op, "backoff_factor", rule.backoff_factor,
               0.0 < rule.backoff_factor && rule.backoff_factor < 1.0, "between 0 and 1");
  check_option(op, "min_scale", rule.min_scale, rule.min_scale > 0.0, "more than 0");
  check_option(op, "max_scale", rule.max_scale, rule.max_scale >= rule.min_scale,
               "min_scale or more");
}

}  // namespace apex_mp

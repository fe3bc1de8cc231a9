// The checks of each operator, shared by its CPU and its CUDA implementation.
#pragma once

#include <ATen/core/List.h>

#include <optional>

#include "checks.h"
#include "math/adam.h"
#include "math/exponent.h"
#include "math/sgd.h"
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

// A number for each tensor of a list.
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

inline void check_adam_options(const char* op, const math::AdamOptions& options) {
  check_option(op, "beta1", options.beta1, 0.0 <= options.beta1 && options.beta1 < 1.0,
               "in [0, 1)");
  check_option(op, "beta2", options.beta2, 0.0 <= options.beta2 && options.beta2 < 1.0,
               "in [0, 1)");
  check_option(op, "eps", options.eps, options.eps >= 0.0, "0 or more");
  check_option(op, "weight_decay", options.weight_decay, options.weight_decay >= 0.0, "0 or more");
}

// Moments are of the math type: float64 for a float64 parameter, else float32.
inline at::ScalarType moment_dtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_adam(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                       at::TensorList exp_avg_sqs, at::TensorList steps,
                       const std::optional<at::TensorList>& copies, const at::Tensor& lr,
                       const at::Tensor& inv_scale, const std::optional<at::Tensor>& found_inf) {
  const char* op = "adam_";
  const auto count = params.size();
  check_same_length(op, "grads", grads.size(), "params", count);
  check_same_length(op, "exp_avgs", exp_avgs.size(), "params", count);
  check_same_length(op, "exp_avg_sqs", exp_avg_sqs.size(), "params", count);
  check_same_length(op, "steps", steps.size(), "params", count);
  if (copies.has_value()) check_same_length(op, "copies", copies->size(), "params", count);
  if (count == 0) return;
  const at::Device device = params[0].device();
  check_number({op, "lr"}, lr, device);
  check_number({op, "inv_scale"}, inv_scale, device);
  if (found_inf.has_value()) {
    check_one_element({op, "found_inf"}, *found_inf, device, {at::kFloat});
  }
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) {
    const Argument param = {op, "params", i};
    check_element(param, params[i], device);
    check_writable(param, params[i]);
    const auto check_peer = [&](const char* name, const at::Tensor& tensor) {
      check_element({op, name, i}, tensor, device);
      check_same_layout({op, name, i}, tensor, param, params[i]);
    };
    check_peer("grads", grads[i]);
    check_peer("exp_avgs", exp_avgs[i]);
    check_writable({op, "exp_avgs", i}, exp_avgs[i]);
    check_dtype({op, "exp_avgs", i}, exp_avgs[i], {moment_dtype(params[i])});
    check_peer("exp_avg_sqs", exp_avg_sqs[i]);
    check_writable({op, "exp_avg_sqs", i}, exp_avg_sqs[i]);
    check_dtype({op, "exp_avg_sqs", i}, exp_avg_sqs[i], {moment_dtype(params[i])});
    check_one_element({op, "steps", i}, steps[i], device, {at::kFloat});
    check_writable({op, "steps", i}, steps[i]);
    if (copies.has_value()) {
      check_peer("copies", (*copies)[i]);
      check_has_memory({op, "copies", i}, (*copies)[i]);
      check_writable({op, "copies", i}, (*copies)[i]);
    }
  }
}

inline void check_sgd_options(const math::SgdOptions& options, bool has_buffers, bool has_fresh) {
  const char* op = "sgd_";
  check_option(op, "momentum", options.momentum, options.momentum >= 0.0, "0 or more");
  check_option(op, "weight_decay", options.weight_decay, options.weight_decay >= 0.0, "0 or more");
  TORCH_CHECK(has_buffers == (options.momentum != 0.0), op, ": momentum is ", options.momentum,
              has_buffers ? ", but there are" : ", but there are no",
              " momentum_buffers; they must be given if momentum is not 0, and then only");
  TORCH_CHECK(has_buffers || !has_fresh, op,
              ": fresh was given without momentum_buffers; it says which of those are");
}

// Momentum buffers may be of any dtype: apex had float16 ones.
inline void check_sgd(at::TensorList params, at::TensorList grads,
                      const std::optional<at::TensorList>& momentum_buffers,
                      const std::optional<at::TensorList>& fresh,
                      const std::optional<at::TensorList>& copies, const at::Tensor& lr,
                      const at::Tensor& inv_scale, const std::optional<at::Tensor>& found_inf,
                      const math::SgdOptions& options) {
  const char* op = "sgd_";
  const auto count = params.size();
  const auto check_length = [&](const char* name, const std::optional<at::TensorList>& list) {
    if (list.has_value()) check_same_length(op, name, list->size(), "params", count);
  };
  check_sgd_options(options, momentum_buffers.has_value(), fresh.has_value());
  check_same_length(op, "grads", grads.size(), "params", count);
  check_length("momentum_buffers", momentum_buffers);
  check_length("fresh", fresh);
  check_length("copies", copies);
  if (count == 0) return;
  const at::Device device = params[0].device();
  check_number({op, "lr"}, lr, device);
  check_number({op, "inv_scale"}, inv_scale, device);
  if (found_inf.has_value()) {
    check_one_element({op, "found_inf"}, *found_inf, device, {at::kFloat});
  }
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) {
    const Argument param = {op, "params", i};
    check_element(param, params[i], device);
    check_writable(param, params[i]);
    check_element({op, "grads", i}, grads[i], device);
    check_same_layout({op, "grads", i}, grads[i], param, params[i]);
    // Dispatch does not look into an optional list.
    const auto check_peer = [&](const char* name, const std::optional<at::TensorList>& list) {
      if (!list.has_value()) return;
      const Argument argument = {op, name, i};
      check_element(argument, (*list)[i], device);
      check_same_layout(argument, (*list)[i], param, params[i]);
      check_has_memory(argument, (*list)[i]);
      check_writable(argument, (*list)[i]);
    };
    check_peer("momentum_buffers", momentum_buffers);
    check_peer("copies", copies);
    if (fresh.has_value()) {
      const Argument argument = {op, "fresh", i};
      check_dense(argument, (*fresh)[i]);
      check_one_element(argument, (*fresh)[i], device, {at::kFloat});
      check_has_memory(argument, (*fresh)[i]);
      check_writable(argument, (*fresh)[i]);
    }
  }
}

}  // namespace apex_mp

// The operators of csrc/ops.cpp on CUDA tensors: checks, device, stream, scratch memory, versions.
// No operator waits for the device. Numbers on the CPU are read at once (a CUDA graph keeps their
// values); numbers on the device are read by the kernel.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/kernels.h"
#include "op_checks.h"
#include "tensor_facts.h"

namespace apex_mp::cuda {
namespace {

// Kernels take one kind of array, not const. Still const_data_ptr: it leaves a lazy clone shared.
Array in(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), dtype_of(tensor)};
}

Array out(const at::Tensor& tensor) { return {tensor.mutable_data_ptr(), dtype_of(tensor)}; }

// Math is done in double if one of the arrays holds doubles.
template <typename... Arrays>
Row<sizeof...(Arrays)> row(int64_t size, const Arrays&... arrays) {
  return {{arrays...}, size, ((arrays.dtype == DType::kDouble) || ...)};
}

// `places` are those of the tensors' sums in sum_sq; empty: nothing is summed.
std::vector<Row<1>> rows_of(at::TensorList tensors, at::IntArrayRef places = {}) {
  std::vector<Row<1>> rows;
  rows.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) rows.push_back(row(tensor.numel(), in(tensor)));
  for (size_t i = 0; i < places.size(); ++i) rows[i].place = static_cast<int32_t>(places[i]);
  return rows;
}

Number number_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return {nullptr, true, number(tensor)};
  return {tensor.const_data_ptr(), tensor.scalar_type() == at::kDouble, 0.0};
}

// Memory for the sums of chunks; torch's allocator gives it only to later work on this stream.
at::Tensor scratch(const std::vector<Row<1>>& tensors, const at::Device& device) {
  return at::empty({count_sums(tensors)}, at::TensorOptions().dtype(at::kDouble).device(device));
}

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }

void check_(at::TensorList grads, at::IntArrayRef places, const at::Tensor& found_inf,
            const at::Tensor& sum_sq) {
  check_check(grads, places, found_inf, sum_sq);
  const c10::cuda::CUDAGuard guard(found_inf.device());
  const std::vector<Row<1>> rows = rows_of(grads, places);
  const at::Tensor chunk_sums = scratch(rows, found_inf.device());
  check(rows,
        {chunk_sums.mutable_data_ptr<double>(), found_inf.mutable_data_ptr<float>(),
         sum_sq.mutable_data_ptr<double>()},
        stream());
  bump_version(found_inf);
  bump_version(sum_sq);
}

void exponents_(at::TensorList tensors, const at::Tensor& counts) {
  check_exponents(tensors, counts);
  const c10::cuda::CUDAGuard guard(counts.device());
  exponents(rows_of(tensors), counts.mutable_data_ptr<int64_t>(), stream());
  bump_version(counts);
}

void unscale_(at::TensorList src, at::TensorList dst, const at::Tensor& inv_scale,
              const at::Tensor& found_inf, at::IntArrayRef places,
              const std::optional<at::Tensor>& sum_sq) {
  check_unscale(src, dst, inv_scale, found_inf, places, sum_sq);
  const c10::cuda::CUDAGuard guard(found_inf.device());
  std::vector<Row<2>> rows;
  rows.reserve(src.size());
  for (size_t i = 0; i < src.size(); ++i) {
    rows.push_back(row(src[i].numel(), in(src[i]), out(dst[i])));
  }
  Unscale task = {number_of(inv_scale), found_inf.mutable_data_ptr<float>(), nullptr};
  if (sum_sq.has_value()) {
    const std::vector<Row<1>> sums_of = rows_of(dst, places);
    const at::Tensor chunk_sums = scratch(sums_of, found_inf.device());
    task.chunk_sums = chunk_sums.mutable_data_ptr<double>();
    unscale(rows, task, stream());
    sum_chunks(sums_of, task.chunk_sums, sum_sq->mutable_data_ptr<double>(), stream());
    bump_version(*sum_sq);
  } else {
    unscale(rows, task, stream());
  }
  bump_versions(dst);
  bump_version(found_inf);
}

void axpby_(at::TensorList x, at::TensorList y, at::TensorList out_list, const at::Tensor& a,
            const at::Tensor& b, const at::Tensor& found_inf, int64_t tested) {
  check_axpby(x, y, out_list, a, b, found_inf, tested);
  const c10::cuda::CUDAGuard guard(found_inf.device());
  std::vector<Row<3>> rows;
  rows.reserve(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    rows.push_back(row(x[i].numel(), in(x[i]), in(y[i]), out(out_list[i])));
  }
  axpby(rows,
        {number_of(a), number_of(b), tested != 1, tested != 0, found_inf.mutable_data_ptr<float>()},
        stream());
  bump_versions(out_list);
  bump_version(found_inf);
}

void update_scale_(const at::Tensor& state, at::ArrayRef<double> rule,
                   const at::Tensor& found_inf) {
  check_update_scale(state, found_inf);
  const c10::cuda::CUDAGuard guard(state.device());
  update_scale(checked_rule("update_scale_", rule),
               {static_cast<math::LossScaleState*>(state.mutable_data_ptr()),
                found_inf.const_data_ptr<float>()},
               stream());
  bump_version(state);
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, CUDA, m) {
  m.impl("check_", &check_);
  m.impl("unscale_", &unscale_);
  m.impl("axpby_", &axpby_);
  m.impl("exponents_", &exponents_);
  m.impl("update_scale_", &update_scale_);
}

}  // namespace apex_mp::cuda

// The function for CUDA tensors: float16 in and out, sums in float32. A warp for each row.

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Half.h>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kWarp = 32, kRowsOfBlock = 8;

__global__ void row_normalize_kernel(const __half* x, __half* y, int64_t rows, int64_t columns) {
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / kWarp;
  if (row >= rows) return;  // The whole warp, so that no lane is missing below.
  const int lane = threadIdx.x % kWarp;
  x += row * columns;
  y += row * columns;
  float sum = 0;  // Of squares: in float16 it overflows as soon as the length is 256.
  for (int64_t i = lane; i < columns; i += kWarp) {
    const float value = __half2float(x[i]);
    sum += value * value;
  }
  for (int other = kWarp / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  const float length = sqrtf(sum);
  for (int64_t i = lane; i < columns; i += kWarp)
    y[i] = __float2half_rn(__half2float(x[i]) / length);
}

// Returns x with each row divided by its length.
Tensor row_normalize(Tensor x) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Half, "x is ", x.scalar_type(),
                  "; it must be Half on CUDA");
  STD_TORCH_CHECK(x.dim() == 2, "x has ", x.dim(), " dimensions; it must have 2");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  x = torch::stable::contiguous(x);
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor y = torch::stable::empty_like(x);
  const int64_t blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
  if (blocks == 0) return y;  // CUDA refuses a grid without blocks.
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  row_normalize_kernel<<<blocks, kWarp * kRowsOfBlock, 0, static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const __half*>(x.const_data_ptr<torch::headeronly::Half>()),
      reinterpret_cast<__half*>(y.mutable_data_ptr<torch::headeronly::Half>()), rows, columns);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "row_normalize did not start: ", cudaGetErrorString(error));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(custom_op, CUDA, m) {
  m.impl("row_normalize", TORCH_BOX(&row_normalize));
}

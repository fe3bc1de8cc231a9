// A function of the user's own: rows of unit length. It takes float32 and nothing else.
//
// The stable headers compile in 3 s where <torch/library.h> takes 12, and what they build runs on
// later versions of PyTorch too.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Returns x with each row divided by its length.
Tensor row_normalize(Tensor x) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "x is ", x.scalar_type(),
                  "; it must be Float");
  STD_TORCH_CHECK(x.dim() == 2, "x has ", x.dim(), " dimensions; it must have 2");
  x = torch::stable::contiguous(x);
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor y = torch::stable::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row, from += columns, to += columns) {
    float sum = 0;  // Of squares: in fp16 it overflows as soon as the length is 256.
    for (int64_t i = 0; i < columns; ++i) sum += from[i] * from[i];
    for (int64_t i = 0; i < columns; ++i) to[i] = from[i] / std::sqrt(sum);
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(custom_op, m) { m.def("row_normalize(Tensor x) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(custom_op, CPU, m) { m.impl("row_normalize", TORCH_BOX(&row_normalize)); }

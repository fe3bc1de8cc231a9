// Facts of a torch tensor that passed the checks, for all backends.
#pragma once

#include <ATen/core/Tensor.h>

#include "dtype.h"

namespace apex_mp {

inline DType dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DType::kHalf;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat;
    case at::kDouble:
      return DType::kDouble;
    case at::kShort:
      return DType::kRemainder;
    case at::kChar:
      return DType::kCode;
    default:  // GCOVR_EXCL_START: the checks let no other dtype pass.
      TORCH_INTERNAL_ASSERT(false, "dtype passed the checks: ", dtype);
      // GCOVR_EXCL_STOP
  }
}

inline DType dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

// The number in a one-element CPU tensor of float32 or float64.
inline double number(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? *tensor.const_data_ptr<double>()
                                             : *tensor.const_data_ptr<float>();
}

}  // namespace apex_mp

// Stands for torch's header: there is one device, and it is the current one.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAGuard {
  explicit CUDAGuard(c10::Device) {}
  ~CUDAGuard() {}  // Not trivial: nobody is warned of a guard that is not used.
};

}  // namespace c10::cuda

// Stands for torch's header: streams of one device, and what is put on one has ended at once.
#pragma once

#include <c10/core/Stream.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace c10::cuda {

// To torch it is a stream of the CPU, where tensors are.
class CUDAStream {
 public:
  explicit CUDAStream(cudaStream_t stream) : stream_(stream) {}

  c10::Device device() const { return c10::kCPU; }
  bool operator==(const CUDAStream&) const = default;
  operator cudaStream_t() const { return stream_; }
  operator c10::Stream() const {
    return c10::Stream(c10::Stream::UNSAFE, device(), reinterpret_cast<intptr_t>(stream_));
  }

 private:
  cudaStream_t stream_;
};

inline CUDAStream getCurrentCUDAStream(c10::DeviceIndex = -1) {
  return CUDAStream(cuda_on_cpu::current_stream());
}

}  // namespace c10::cuda

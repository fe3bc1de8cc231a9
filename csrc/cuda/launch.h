// The one place that starts a kernel. The tests put a header of the same name before this one, to
// run kernels on the host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace apex_mp::cuda {

constexpr int kBlockSize = 256;
constexpr int kWarpSize = 32;

// The largest gridDim.x.
constexpr int64_t kMaxBlocks = 2147483647;

// Starts `blocks` blocks of kBlockSize threads, or does nothing for 0, which CUDA refuses. Throws
// errors of the launch as std::runtime_error, which torch shows as a RuntimeError.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
            const Arguments&... arguments) {
  if (blocks == 0) return;
  if (blocks > kMaxBlocks) throw std::runtime_error("apex_mp: too many blocks for one CUDA launch");
  kernel<<<static_cast<unsigned int>(blocks), kBlockSize, 0, stream>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  // GCOVR_EXCL_START: on the host every kernel starts.
  throw std::runtime_error(std::string("apex_mp: a CUDA kernel did not start: ") +
                           cudaGetErrorString(error));
  // GCOVR_EXCL_STOP
}

}  // namespace apex_mp::cuda

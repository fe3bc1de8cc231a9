// update_scale_ on CUDA: one step of the dynamic loss scale, without the host.
#include "math/update_scale.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace apex_mp::cuda {
namespace {

__global__ void update_scale_kernel(const math::LossScaleRule rule, const UpdateScale task) {
  if (threadIdx.x != 0) return;
  *task.state = math::update_scale(*task.state, *task.found_inf != 0.0f, rule);
}

}  // namespace

void update_scale(const math::LossScaleRule& rule, const UpdateScale& task, cudaStream_t stream) {
  launch(update_scale_kernel, 1, stream, rule, task);
}

}  // namespace apex_mp::cuda

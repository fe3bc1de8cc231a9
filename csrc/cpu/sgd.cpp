// sgd_ on the CPU: one pass over parameters, momentum buffers and gradients, one parallel region
// for a list.
#include <torch/library.h>

#include "cpu/tensors.h"
#include "op_checks.h"

namespace apex_mp::cpu {
namespace {

void sgd_(at::TensorList params, at::TensorList grads,
          const std::optional<at::TensorList>& momentum_buffers,
          const std::optional<at::TensorList>& fresh, const std::optional<at::TensorList>& copies,
          const at::Tensor& lr, const at::Tensor& inv_scale,
          const std::optional<at::Tensor>& found_inf, double momentum, double dampening,
          double weight_decay, bool nesterov, bool wd_after_momentum) {
  const math::SgdOptions options = {momentum, dampening, weight_decay, nesterov, wd_after_momentum};
  check_sgd(params, grads, momentum_buffers, fresh, copies, lr, inv_scale, found_inf, options);
  if (params.empty() || (found_inf.has_value() && number(*found_inf) != 0.0)) return;

  std::vector<math::SgdFactors<double>> factors;
  std::vector<StepChunk> tensors;
  factors.reserve(params.size());
  tensors.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const Out none = {nullptr, DType::kHalf};
    const Out buffer = momentum_buffers.has_value() ? out((*momentum_buffers)[i]) : none;
    const Out copy = copies.has_value() ? out((*copies)[i]) : none;
    tensors.push_back({out(params[i]), in(grads[i]), copy, {buffer, none}, params[i].numel()});
    bool is_fresh = false;
    if (fresh.has_value()) {
      float& flag = *(*fresh)[i].mutable_data_ptr<float>();
      is_fresh = flag != 0.0f;
      flag = 0.0f;
    }
    factors.push_back(math::sgd_factors(options, number(lr), number(inv_scale), is_fresh));
  }

  const std::vector<Chunk> chunks = chunks_of(params);
  const StepKernel step = kernels().step[math::AllRules::number<math::Sgd>()];
  for_each_chunk(chunks, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    step(part_of(tensors[chunk.tensor], chunk), &factors[chunk.tensor]);
  });

  bump_versions(params);
  if (momentum_buffers.has_value()) bump_versions(*momentum_buffers);
  if (fresh.has_value()) bump_versions(*fresh);
  if (copies.has_value()) bump_versions(*copies);
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, CPU, m) { m.impl("sgd_", &sgd_); }

}  // namespace apex_mp::cpu

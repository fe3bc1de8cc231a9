// adam_ on the CPU: one pass over parameters, moments and gradients, one parallel region for a
// list.
#include <torch/library.h>

#include "cpu/tensors.h"
#include "op_checks.h"

namespace apex_mp::cpu {
namespace {

void adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
           at::TensorList exp_avg_sqs, at::TensorList steps,
           const std::optional<at::TensorList>& copies, const at::Tensor& lr,
           const at::Tensor& inv_scale, const std::optional<at::Tensor>& found_inf, double beta1,
           double beta2, double eps, double weight_decay, bool adam_w_mode, bool bias_correction,
           bool eps_inside_sqrt) {
  check_adam(params, grads, exp_avgs, exp_avg_sqs, steps, copies, lr, inv_scale, found_inf);
  const math::AdamOptions options = {
      beta1, beta2, eps, weight_decay, adam_w_mode, bias_correction, eps_inside_sqrt};
  check_adam_options("adam_", options);
  if (params.empty() || (found_inf.has_value() && number(*found_inf) != 0.0)) return;

  std::vector<math::AdamFactors<double>> factors;
  factors.reserve(params.size());
  for (const at::Tensor& step : steps) {
    float& count = *step.mutable_data_ptr<float>();
    count += 1.0f;
    factors.push_back(math::adam_factors(options, number(lr), count, number(inv_scale)));
  }

  std::vector<StepChunk> tensors;
  tensors.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const Out copy = copies.has_value() ? out((*copies)[i]) : Out{nullptr, DType::kHalf};
    tensors.push_back({out(params[i]),
                       in(grads[i]),
                       copy,
                       {out(exp_avgs[i]), out(exp_avg_sqs[i])},
                       params[i].numel()});
  }
  const std::vector<Chunk> chunks = chunks_of(params);
  const StepKernel step = kernels().step[math::AllRules::number<math::Adam>()];
  for_each_chunk(chunks, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    step(part_of(tensors[chunk.tensor], chunk), &factors[chunk.tensor]);
  });

  bump_versions(params);
  bump_versions(exp_avgs);
  bump_versions(exp_avg_sqs);
  bump_versions(steps);
  if (copies.has_value()) bump_versions(*copies);
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, CPU, m) { m.impl("adam_", &adam_); }

}  // namespace apex_mp::cpu

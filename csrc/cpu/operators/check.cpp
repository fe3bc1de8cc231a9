// check_ and l2_norm_ on the CPU: one pass that reads every element once.
#include <torch/library.h>

#include <cmath>

#include "cpu/tensors.h"
#include "op_checks.h"

namespace apex_mp::cpu {
namespace {

std::vector<CheckResult> check_chunks(at::TensorList tensors, const std::vector<Chunk>& chunks) {
  const std::vector<In> arrays = in(tensors);
  const Kernels& level = kernels();
  std::vector<CheckResult> results(chunks.size());
  for_each_chunk(chunks, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    results[index] = level.check(at_element(arrays[chunk.tensor], chunk.begin), chunk.count);
  });
  return results;
}

void check_(at::TensorList grads, at::IntArrayRef groups, const at::Tensor& found_inf,
            const at::Tensor& sum_sq) {
  check_check(grads, groups, found_inf, sum_sq);
  const std::vector<Chunk> chunks = chunks_of(grads);
  const std::vector<CheckResult> results = check_chunks(grads, chunks);
  auto* sums = sum_sq.mutable_data_ptr<double>();
  // In the order of the chunks, whatever thread computed them: the sum is reproducible.
  for (size_t i = 0; i < chunks.size(); ++i) {
    sums[groups[chunks[i].tensor]] += results[i].sum_sq;
    if (results[i].found_inf) *found_inf.mutable_data_ptr<float>() = 1.0f;
  }
  bump_version(found_inf);
  bump_version(sum_sq);
}

void store_number(const at::Tensor& tensor, int64_t index, double value) {
  if (tensor.scalar_type() == at::kDouble) {
    tensor.mutable_data_ptr<double>()[index] = value;
  } else {
    tensor.mutable_data_ptr<float>()[index] = static_cast<float>(value);
  }
}

void l2_norm_(at::TensorList tensors, const at::Tensor& norm,
              const std::optional<at::Tensor>& norms) {
  check_l2_norm(tensors, norm, norms);
  const std::vector<Chunk> chunks = chunks_of(tensors);
  const std::vector<CheckResult> results = check_chunks(tensors, chunks);
  std::vector<double> sums(tensors.size(), 0.0);
  for (size_t i = 0; i < chunks.size(); ++i) sums[chunks[i].tensor] += results[i].sum_sq;
  double total = 0.0;
  for (const double sum : sums) total += sum;
  store_number(norm, 0, std::sqrt(total));
  bump_version(norm);
  if (!norms.has_value()) return;
  for (size_t i = 0; i < sums.size(); ++i) {
    store_number(*norms, static_cast<int64_t>(i), std::sqrt(sums[i]));
  }
  bump_version(*norms);
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, CPU, m) {
  m.impl("check_", &check_);
  m.impl("l2_norm_", &l2_norm_);
}

}  // namespace apex_mp::cpu

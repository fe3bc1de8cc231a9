// unscale_ and axpby_ on the CPU: new gradients from scaled or stashed ones, with the finite test.
#include <torch/library.h>

#include "cpu/tensors.h"
#include "op_checks.h"

namespace apex_mp::cpu {
namespace {

void unscale_(at::TensorList src, at::TensorList dst, const at::Tensor& inv_scale,
              const at::Tensor& found_inf, at::IntArrayRef places,
              const std::optional<at::Tensor>& sum_sq) {
  check_unscale(src, dst, inv_scale, found_inf, places, sum_sq);
  const std::vector<In> sources = in(src);
  const std::vector<Out> targets = out(dst);
  const double factor = number(inv_scale);
  const Kernels& level = kernels();
  const std::vector<Chunk> chunks = chunks_of(src);
  std::vector<double> chunk_sums(chunks.size());
  for_each_chunk_testing(chunks, found_inf, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    const CheckResult result = level.unscale(at_element(sources[chunk.tensor], chunk.begin),
                                             at_element(targets[chunk.tensor], chunk.begin),
                                             chunk.count, factor, sum_sq.has_value());
    chunk_sums[index] = result.sum_sq;
    return result.found_inf;
  });
  bump_versions(dst);
  bump_version(found_inf);
  if (!sum_sq.has_value()) return;
  auto* sums = sum_sq->mutable_data_ptr<double>();
  for (const int64_t place : places) sums[place] = 0.0;
  for (size_t i = 0; i < chunks.size(); ++i) sums[places[chunks[i].tensor]] += chunk_sums[i];
  bump_version(*sum_sq);
}

void axpby_(at::TensorList x, at::TensorList y, at::TensorList out_list, const at::Tensor& a,
            const at::Tensor& b, const at::Tensor& found_inf, int64_t tested) {
  check_axpby(x, y, out_list, a, b, found_inf, tested);
  const std::vector<In> xs = in(x);
  const std::vector<In> ys = in(y);
  const std::vector<Out> outs = out(out_list);
  const math::Axpby<double> factors = {number(a), number(b), tested != 1, tested != 0};
  const Kernels& level = kernels();
  const std::vector<Chunk> chunks = chunks_of(x);
  for_each_chunk_testing(chunks, found_inf, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    return level.axpby(at_element(xs[chunk.tensor], chunk.begin),
                       at_element(ys[chunk.tensor], chunk.begin),
                       at_element(outs[chunk.tensor], chunk.begin), chunk.count, factors);
  });
  bump_versions(out_list);
  bump_version(found_inf);
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, CPU, m) {
  m.impl("unscale_", &unscale_);
  m.impl("axpby_", &axpby_);
}

}  // namespace apex_mp::cpu

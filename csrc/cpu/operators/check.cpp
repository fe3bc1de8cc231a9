// check_ on the CPU: one pass that reads every element once.
#include <torch/library.h>

#include "cpu/measure.h"
#include "op_checks.h"

namespace apex_mp::cpu {
namespace {

void check_(at::TensorList grads, at::IntArrayRef places, const at::Tensor& found_inf,
            const at::Tensor& sum_sq) {
  check_check(grads, places, found_inf, sum_sq);
  const std::vector<In> arrays = in(grads);
  const std::vector<Chunk> chunks = chunks_of(grads);
  std::vector<CheckResult> results;
  measure(chunks, results, [&](int64_t tensor) { return arrays[tensor]; });
  auto* sums = sum_sq.mutable_data_ptr<double>();
  for (const int64_t place : places) sums[place] = 0.0;
  const bool found = each_result(chunks, results,
                                 [&](int64_t tensor, double sum) { sums[places[tensor]] += sum; });
  if (found) *found_inf.mutable_data_ptr<float>() = 1.0f;
  bump_version(found_inf);
  bump_version(sum_sq);
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, CPU, m) { m.impl("check_", &check_); }

}  // namespace apex_mp::cpu

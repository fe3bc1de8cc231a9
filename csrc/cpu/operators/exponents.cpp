// exponents_ on the CPU: one pass that reads every element once.
#include <torch/library.h>

#include <mutex>

#include "cpu/tensors.h"
#include "math/exponent.h"
#include "op_checks.h"

namespace apex_mp::cpu {
namespace {

void exponents_(at::TensorList tensors, const at::Tensor& counts) {
  check_exponents(tensors, counts);
  const std::vector<In> arrays = in(tensors);
  const std::vector<Chunk> chunks = chunks_of(tensors);
  const Kernels& level = kernels();
  auto* all = counts.mutable_data_ptr<int64_t>();
  std::mutex mutex;
  for_each_chunk(chunks, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    int32_t of_chunk[math::kExponentBins] = {};
    level.exponents(at_element(arrays[chunk.tensor], chunk.begin), chunk.count, of_chunk);
    int64_t* of_tensor = all + chunk.tensor * math::kExponentBins;
    // Sums of integers do not depend on the order.
    const std::lock_guard<std::mutex> lock(mutex);
    for (int bin = 0; bin < math::kExponentBins; ++bin) of_tensor[bin] += of_chunk[bin];
  });
  bump_version(counts);
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, CPU, m) { m.impl("exponents_", &exponents_); }

}  // namespace apex_mp::cpu

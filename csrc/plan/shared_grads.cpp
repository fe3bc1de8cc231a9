// Finds shared gradients by their addresses.
#include "plan/shared_grads.h"

#include <algorithm>
#include <utility>

namespace apex_mp::step {

void separate_shared_grads(const std::string& caller, std::vector<RowTensors>& tensors,
                           std::vector<Row>& rows, std::deque<at::Tensor>& kept) {
  std::vector<std::pair<const char*, size_t>> writers;  // begin of the gradient, and number
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!tensors[i].writes_grad || rows[i].size == 0 || rows[i].grad.data == nullptr) continue;
    writers.emplace_back(static_cast<const char*>(rows[i].grad.data), i);
  }
  std::sort(writers.begin(), writers.end());
  const char* begin = nullptr;
  const char* end = nullptr;
  for (const auto& [here, i] : writers) {
    const char* here_end = here + tensors[i].grad->nbytes();
    if (here >= end) {
      begin = here;
      end = here_end;
      continue;
    }
    TORCH_CHECK(here == begin && here_end == end, caller,
                ": two gradients overlap in memory without being the same, so they cannot "
                "be unscaled in place; clone() one of them or construct the optimizer with "
                "unscale_grads=False");
    kept.push_back(tensors[i].grad->clone());
    tensors[i].grad = &kept.back();
    tensors[i].writes_grad = false;
    rows[i] = memory_of(tensors[i]);
  }
}

}  // namespace apex_mp::step

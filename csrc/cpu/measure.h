// The pass that looks for inf and NaN and sums squares, for check_ and for steps.
#pragma once

#include <vector>

#include "cpu/tensors.h"

namespace apex_mp::cpu {

// Reads every chunk once; array_of(tensor) returns the memory of a tensor.
template <typename ArrayOf>
void measure(const std::vector<Chunk>& chunks, std::vector<CheckResult>& results,
             const ArrayOf& array_of) {
  results.resize(chunks.size());
  const Kernels& level = kernels();
  for_each_chunk(chunks, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    results[index] = level.check(at_element(array_of(chunk.tensor), chunk.begin), chunk.count);
  });
}

// Calls add(tensor, sum) for each chunk, and returns whether there is inf or NaN. In the order of
// the chunks, whatever thread has read them: the sums are reproducible.
template <typename Add>
bool each_result(const std::vector<Chunk>& chunks, const std::vector<CheckResult>& results,
                 const Add& add) {
  int32_t found_inf = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    add(chunks[i].tensor, results[i].sum_sq);
    found_inf |= results[i].found_inf;
  }
  return found_inf != 0;
}

}  // namespace apex_mp::cpu

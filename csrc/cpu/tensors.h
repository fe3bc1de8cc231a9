// Converts torch tensors to the arguments of CPU kernels, and loops over the chunks of a list. For
// operators/ and step/.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "launch_plan.h"
#include "tensor_facts.h"

namespace apex_mp::cpu {

// 16 Ki elements: 64 KiB of float, so that a chunk's tiles stay in the cache of one core, and a
// million elements still make work for 64 threads.
constexpr int64_t kChunkSize = 16384;

// The elements that a thread takes at a time. For fewer no other thread is woken: waiting for it at
// the end would cost more than it saves, most of all if cores are busy with other programs.
constexpr int64_t kElementsAtATime = 32768;
constexpr int64_t kElementsPerThread = 2 * kElementsAtATime;
// To begin a chunk, with other memory, takes as long as so many elements.
constexpr int64_t kElementsOfBeginning = 256;

inline In in(const at::Tensor& tensor) { return {tensor.const_data_ptr(), dtype_of(tensor)}; }

inline Out out(const at::Tensor& tensor) { return {tensor.mutable_data_ptr(), dtype_of(tensor)}; }

template <typename void_t>
Array<void_t> at_element(Array<void_t> array, int64_t index) {
  using byte_t = std::conditional_t<std::is_const_v<void_t>, const char, char>;
  return {static_cast<byte_t*>(array.data) + index * size_of(array.dtype), array.dtype};
}

inline std::vector<In> in(at::TensorList tensors) {
  std::vector<In> arrays;
  arrays.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) arrays.push_back(in(tensor));
  return arrays;
}

inline std::vector<Out> out(at::TensorList tensors) {
  std::vector<Out> arrays;
  arrays.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) arrays.push_back(out(tensor));
  return arrays;
}

inline std::vector<Chunk> chunks_of(at::TensorList tensors) {
  std::vector<int64_t> sizes;
  sizes.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) sizes.push_back(tensor.numel());
  return cut_into_chunks(sizes, kChunkSize);
}

// Calls body(index) once for every chunk, in one parallel region for the whole list. A thread takes
// the next few chunks when it has done its last ones, so that one that shares its core with another
// program does not keep the others waiting. Results must not depend on which thread takes a chunk.
template <typename Body>
void for_each_chunk(const std::vector<Chunk>& chunks, const Body& body) {
  const auto count = static_cast<int64_t>(chunks.size());
  int64_t elements = count * kElementsOfBeginning;
  for (const Chunk& chunk : chunks) elements += chunk.count;
  const int64_t few =
      std::max<int64_t>(1, count * kElementsAtATime / std::max<int64_t>(1, elements));
  const int64_t threads =
      std::clamp<int64_t>(elements / kElementsPerThread, 1, at::get_num_threads());
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t first = next.fetch_add(few); first < count; first = next.fetch_add(few)) {
      for (int64_t index = first; index < std::min(first + few, count); ++index) body(index);
    }
  });
}

// As for_each_chunk, for a body that returns whether it found inf or NaN; sets found_inf if any
// did.
template <typename Body>
void for_each_chunk_testing(const std::vector<Chunk>& chunks, const at::Tensor& found_inf,
                            const Body& body) {
  std::vector<int32_t> found(chunks.size(), 0);
  for_each_chunk(chunks, [&](int64_t index) { found[index] = body(index); });
  const bool any = std::any_of(found.begin(), found.end(), [](int32_t one) { return one != 0; });
  if (any) *found_inf.mutable_data_ptr<float>() = 1.0f;
}

}  // namespace apex_mp::cpu

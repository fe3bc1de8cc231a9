// The tensors of one launch, passed by value as a kernel argument: so there is no copy to the
// device and no pinned memory, and a CUDA graph keeps it. For all kernels over lists of tensors.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/variants.h"
#include "cuda/vectors.h"
#include "launch_plan.h"

namespace apex_mp::cuda {

// The numbers of one block. A short list has smaller chunks, so that all multiprocessors have work:
// 4 blocks for each of the 132 of an H100.
constexpr int64_t kLargestChunk = APEX_MP_CHUNK_SIZE;
constexpr int64_t kSmallestChunk = 2048;
constexpr ChunkLimits kChunkLimits = {kLargestChunk, kSmallestChunk, 4 * 132};

// For sums all lists have chunks of one size, so that the sum of a tensor does not depend on the
// other tensors.
constexpr ChunkLimits kSumLimits = {kLargestChunk, kLargestChunk, 0};

// When it is halved it stays a multiple of 16: all chunks of a tensor must have the same alignment,
// which is computed once for the tensor (common_head).
static_assert((kLargestChunk & (kLargestChunk - 1)) == 0);
static_assert(kLargestChunk >= kSmallestChunk && kSmallestChunk % 16 == 0);

// For a few tensors: the time to copy the arguments of a launch grows with their size.
constexpr int kFewTableBytes = 3600;

// A kernel may have 32,764 bytes of arguments since CUDA 12.1, before that 4,096. What the table
// leaves is enough for the other arguments. setup.py refuses GPUs before sm_70, for which 4,096
// bytes are the limit.
constexpr int kTableBytes = CUDART_VERSION >= 12010 ? 32400 : kFewTableBytes;

template <int kArrays>
struct Table {
  static constexpr int kBytesPerTensor = kArrays * 9 + 18;
  static constexpr int kTensors = (kTableBytes - 64) / kBytesPerTensor;

  void* data[kArrays][kTensors];
  int64_t size[kTensors];
  int32_t first_chunk[kTensors];  // chunks of this launch before this tensor
  int32_t place[kTensors];
  uint8_t dtype[kArrays][kTensors];
  int8_t head[kTensors];  // numbers before the first aligned vector, -1: there is none
  bool double_math[kTensors];
  Launch launch;
  int64_t chunk_size;
};

template <int kArrays>
int32_t head_of(const Row<kArrays>& row) {
  std::vector<ArrayStart> starts;
  for (const Array& array : row.arrays) {
    if (array.data == nullptr) continue;
    starts.push_back({reinterpret_cast<uintptr_t>(array.data), size_of(array.dtype)});
  }
  return common_head(starts, row.double_math ? 1 : kVector<float, kArrays>);
}

// Calls body(table) for each launch that the list needs.
template <int kArrays, typename Body>
void for_each_table(const std::vector<Row<kArrays>>& rows, const ChunkLimits& limits,
                    const Body& body) {
  static_assert(sizeof(Table<kArrays>) <= kTableBytes);
  std::vector<int64_t> sizes;
  sizes.reserve(rows.size());
  for (const Row<kArrays>& row : rows) sizes.push_back(row.size);
  Table<kArrays> table;
  table.chunk_size = chunk_size_of(sizes, limits);
  for (const Launch& launch :
       cut_into_launches(sizes, table.chunk_size, Table<kArrays>::kTensors, kMaxBlocks)) {
    table.launch = launch;
    int64_t chunks = 0;
    for (int64_t slot = 0; slot < launch.tensors; ++slot) {
      const Row<kArrays>& row = rows[launch.first_tensor + slot];
      for (int i = 0; i < kArrays; ++i) {
        table.data[i][slot] = row.arrays[i].data;
        table.dtype[i][slot] = static_cast<uint8_t>(row.arrays[i].dtype);
      }
      table.size[slot] = row.size;
      table.first_chunk[slot] = static_cast<int32_t>(chunks);
      table.place[slot] = row.place;
      table.head[slot] = static_cast<int8_t>(head_of(row));
      table.double_math[slot] = row.double_math;
      chunks += count_chunks(row.size, table.chunk_size);
    }
    body(table);
  }
}

// The part of a tensor that this block works on: arrays from the chunk's first number on.
template <int kArrays>
struct Part {
  Array arrays[kArrays];
  int32_t count;
  int32_t head;
  bool double_math;
  bool copy_counts;  // of a step alone, see step::Row
  int32_t slot;
};

template <int kArrays>
__device__ Part<kArrays> part_of_block(const Table<kArrays>& table) {
  const auto block = static_cast<int32_t>(blockIdx.x);
  Part<kArrays> part;
  part.slot = find_slot(table.first_chunk, static_cast<int32_t>(table.launch.tensors), block);
  const Chunk chunk = chunk_of(part.slot, block - table.first_chunk[part.slot],
                               table.size[part.slot], table.chunk_size);
  part.count = static_cast<int32_t>(chunk.count);
  part.head = table.head[part.slot];
  part.double_math = table.double_math[part.slot];
#pragma unroll
  for (int i = 0; i < kArrays; ++i) {
    const auto dtype = static_cast<DType>(table.dtype[i][part.slot]);
    char* data = static_cast<char*>(table.data[i][part.slot]);
    if (data != nullptr) data += chunk.begin * size_of(dtype);
    part.arrays[i] = {data, dtype};
  }
  return part;
}

}  // namespace apex_mp::cuda

// Cuts lists of tensors into chunks of bounded size: plain C++, no torch, no CUDA. For cpu/ and
// cuda/.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "math/common.h"

namespace apex_mp {

// Consecutive elements of one tensor; the unit of work of one thread (CPU) or one block (CUDA).
struct Chunk {
  int64_t tensor;
  int64_t begin;
  int64_t count;
};

inline int64_t count_chunks(int64_t size, int64_t chunk_size) {
  return size / chunk_size + (size % chunk_size != 0);
}

// Returns chunk number `index` of a tensor. Its begin exceeds 2**31 long before its index does.
APEX_MP_MATH Chunk chunk_of(int64_t tensor, int64_t index, int64_t size, int64_t chunk_size) {
  const int64_t begin = index * chunk_size;
  const int64_t left = size - begin;
  return {tensor, begin, left < chunk_size ? left : chunk_size};
}

inline void append_chunks(int64_t tensor, int64_t size, int64_t chunk_size,
                          std::vector<Chunk>& chunks) {
  for (int64_t index = 0; index < count_chunks(size, chunk_size); ++index) {
    chunks.push_back(chunk_of(tensor, index, size, chunk_size));
  }
}

// Returns the chunks in the order of the list; an empty tensor has none. The order depends on
// sizes, not on threads, so a sum over chunks in order is reproducible.
inline std::vector<Chunk> cut_into_chunks(const std::vector<int64_t>& sizes, int64_t chunk_size) {
  std::vector<Chunk> chunks;
  for (int64_t tensor = 0; tensor < static_cast<int64_t>(sizes.size()); ++tensor) {
    append_chunks(tensor, sizes[tensor], chunk_size, chunks);
  }
  return chunks;
}

// Limits of the size of chunks, powers of two.
struct ChunkLimits {
  int64_t largest;
  int64_t smallest;
  int64_t enough;  // as many chunks need not be smaller
};

// Returns the largest size at which a list has enough chunks, or `smallest` if none is small
// enough.
inline int64_t chunk_size_of(const std::vector<int64_t>& sizes, const ChunkLimits& limits) {
  const auto makes_enough = [&](int64_t chunk_size) {
    int64_t chunks = 0;
    for (size_t i = 0; i < sizes.size() && chunks < limits.enough; ++i) {
      chunks += count_chunks(sizes[i], chunk_size);
    }
    return chunks >= limits.enough;
  };
  int64_t chunk_size = limits.largest;
  while (chunk_size > limits.smallest && !makes_enough(chunk_size)) chunk_size /= 2;
  return chunk_size;
}

// One kernel launch over consecutive tensors of the list. Block b takes chunk first_chunk + b of
// cut_into_chunks(); find_slot() finds its tensor.
struct Launch {
  int64_t first_tensor;
  int64_t tensors;
  int64_t first_chunk;
  int64_t chunks;  // 0 if all its tensors are empty
};

// Returns the launches, in order; every tensor of the list, even if empty, belongs to exactly one.
// A tensor is not divided: more than max_chunks chunks (2**31 of them are 2**45 numbers) are
// refused.
inline std::vector<Launch> cut_into_launches(const std::vector<int64_t>& sizes, int64_t chunk_size,
                                             int64_t max_tensors, int64_t max_chunks) {
  std::vector<Launch> launches;
  int64_t all_chunks = 0;
  for (int64_t tensor = 0; tensor < static_cast<int64_t>(sizes.size()); ++tensor) {
    const int64_t chunks = count_chunks(sizes[tensor], chunk_size);
    if (chunks > max_chunks) throw std::length_error("a tensor is too large for one launch");
    if (launches.empty() || launches.back().tensors == max_tensors ||
        launches.back().chunks > max_chunks - chunks) {
      launches.push_back({tensor, 0, all_chunks, 0});
    }
    launches.back().tensors += 1;
    launches.back().chunks += chunks;
    all_chunks += chunks;
  }
  return launches;
}

// Returns the tensor of a launch that contains its chunk `chunk`; first_chunk[slot] is the number
// of chunks before tensor `slot`. This is the last slot that begins at or before the chunk: an
// empty tensor begins where the next one does, and is never returned.
APEX_MP_MATH int32_t find_slot(const int32_t* first_chunk, int32_t tensors, int32_t chunk) {
  int32_t found = 0;
  int32_t end = tensors;
  while (end - found > 1) {
    const int32_t middle = found + (end - found) / 2;
    if (first_chunk[middle] <= chunk) {
      found = middle;
    } else {
      end = middle;
    }
  }
  return found;
}

// The address of an array, and the bytes of one of its numbers.
struct ArrayStart {
  uintptr_t address;
  int64_t number_bytes;
};

// Returns how many numbers must be taken one by one before vectors of `width` numbers are aligned
// in all arrays at once, or -1 if they never are. A vector is loaded and stored in pieces of its
// size, at most 16 bytes, and each piece must be aligned to its size.
inline int32_t common_head(const std::vector<ArrayStart>& arrays, int64_t width) {
  for (int32_t head = 0; head < width; ++head) {
    bool aligned = true;
    for (const ArrayStart& array : arrays) {
      const int64_t bytes = width * array.number_bytes;
      const uintptr_t alignment = bytes < 16 ? bytes : 16;
      aligned &= (array.address + head * array.number_bytes) % alignment == 0;
    }
    if (aligned) return head;
  }
  return -1;
}

}  // namespace apex_mp

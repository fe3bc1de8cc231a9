// Numbers of any dtype in and out of memory, in vectors of up to 16 bytes a load, and the walk of a
// block over its part. dtypes are known at run time only: a branch for every vector costs nothing
// beside the memory, and one kernel serves all mixtures of dtypes in a list.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace apex_mp::cuda {

// Numbers that a thread takes at once: for float math 16 bytes of fp16, or twice 16 of fp32. In
// double math, a rare case, more than one would cost all other cases registers.
template <typename opmath_t>
constexpr int kVector = sizeof(opmath_t) == sizeof(float) ? 8 : 1;

// A number of type int that is known at compile time, for the argument of a generic lambda
// (std::integral_constant converts on the host only).
template <int width>
struct Width {
  __host__ __device__ constexpr operator int() const { return width; }
};

// Calls body(index, Width<n>) for all numbers of a part, n at a time: with n = kVector where
// vectors are aligned in all arrays, one by one before and behind.
template <typename opmath_t, typename PartOf, typename Body>
__device__ void walk(const PartOf& part, const Body& body) {
  constexpr int kWidth = kVector<opmath_t>;
  const bool aligned = part.head >= 0 && part.head < part.count;
  const int first = aligned ? part.head : part.count;
  const int vectors = (part.count - first) / kWidth;
  for (int i = threadIdx.x; i < vectors; i += kBlockSize) {
    body(first + i * kWidth, Width<kWidth>{});
  }
  const int in_vectors = vectors * kWidth;
#pragma unroll 1  // A handful of numbers, or a rare case: not worth more code.
  for (int i = threadIdx.x; i < part.count - in_vectors; i += kBlockSize) {
    // In double math every number is a vector, and nothing is left for here.
    body(i < first ? i : i + in_vectors, Width<1>{});  // GCOVR_EXCL_LINE
  }
}

// `width` numbers as they lie in memory. Whoever needs several arrays loads them all before
// converting any, so that the loads are under way together.
template <typename opmath_t, int width>
struct Raw {
  uint32_t words[width * sizeof(opmath_t) / sizeof(uint32_t)];
};

// Whether memory is likely to be read again soon: what is streamed leaves the caches first.
enum class Cache { kKept, kStreamed };

template <Cache cache, typename Word>
__device__ Word fetch(const Word* src) {
  if constexpr (cache == Cache::kStreamed) return __ldcs(src);
  return *src;
}

template <Cache cache, typename Word>
__device__ void put(Word word, Word* dst) {
  if constexpr (cache == Cache::kStreamed) {
    __stcs(dst, word);
  } else {
    *dst = word;
  }
}

template <int bytes, Cache cache>
__device__ void load_words(const char* src, uint32_t* words) {
  if constexpr (bytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) {
      const uint4 four = fetch<cache>(reinterpret_cast<const uint4*>(src) + i);
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  } else if constexpr (bytes == 8) {
    const uint2 two = fetch<cache>(reinterpret_cast<const uint2*>(src));
    words[0] = two.x;
    words[1] = two.y;
  } else if constexpr (bytes == 4) {
    words[0] = fetch<cache>(reinterpret_cast<const uint32_t*>(src));
  } else {
    static_assert(bytes == 2);
    words[0] = fetch<cache>(reinterpret_cast<const uint16_t*>(src));
  }
}

template <int bytes, Cache cache>
__device__ void store_words(const uint32_t* words, char* dst) {
  if constexpr (bytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) {
      const uint4 four =
          make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
      put<cache>(four, reinterpret_cast<uint4*>(dst) + i);
    }
  } else if constexpr (bytes == 8) {
    put<cache>(make_uint2(words[0], words[1]), reinterpret_cast<uint2*>(dst));
  } else if constexpr (bytes == 4) {
    put<cache>(words[0], reinterpret_cast<uint32_t*>(dst));
  } else {
    static_assert(bytes == 2);
    put<cache>(static_cast<uint16_t>(words[0]), reinterpret_cast<uint16_t*>(dst));
  }
}

// The caller has chosen double math if the array holds doubles.
template <typename opmath_t, int width, Cache cache = Cache::kKept>
__device__ Raw<opmath_t, width> load(const Array& array, int index) {
  const char* src = static_cast<const char*>(array.data) + index * size_of(array.dtype);
  Raw<opmath_t, width> raw;
  if (size_of(array.dtype) == 2) {
    load_words<width * 2, cache>(src, raw.words);
  } else if (sizeof(opmath_t) == 4 || array.dtype == DType::kFloat) {
    load_words<width * 4, cache>(src, raw.words);
  } else {
    load_words<width * sizeof(opmath_t), cache>(src, raw.words);
  }
  return raw;
}

__device__ inline unsigned short half_word(const uint32_t* words, int i) {
  return static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
}

template <typename opmath_t, int width>
__device__ void widen(const Raw<opmath_t, width>& raw, DType dtype, opmath_t (&numbers)[width]) {
  if (dtype == DType::kHalf) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      numbers[i] = __half2float(__ushort_as_half(half_word(raw.words, i)));
    }
  } else if (dtype == DType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      numbers[i] = __bfloat162float(__ushort_as_bfloat16(half_word(raw.words, i)));
    }
  } else if (sizeof(opmath_t) == 4 || dtype == DType::kFloat) {
#pragma unroll
    for (int i = 0; i < width; ++i) numbers[i] = __uint_as_float(raw.words[i]);
  } else if constexpr (sizeof(opmath_t) == 8) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      numbers[i] = __hiloint2double(static_cast<int>(raw.words[2 * i + 1]),
                                    static_cast<int>(raw.words[2 * i]));
    }
  }
}

template <typename opmath_t, int width>
__device__ void read(const Array& array, int index, opmath_t (&numbers)[width]) {
  widen(load<opmath_t, width>(array, index), array.dtype, numbers);
}

// Stores numbers; from double to a half type by way of float, as torch converts.
template <Cache cache = Cache::kKept, typename opmath_t, int width>
__device__ void store(const opmath_t (&numbers)[width], const Array& array, int index) {
  char* dst = static_cast<char*>(array.data) + index * size_of(array.dtype);
  uint32_t words[2 * width] = {};
  if (array.dtype == DType::kHalf) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const __half half = __float2half_rn(static_cast<float>(numbers[i]));
      words[i / 2] |= static_cast<uint32_t>(__half_as_ushort(half)) << (i % 2 * 16);
    }
    store_words<width * 2, cache>(words, dst);
  } else if (array.dtype == DType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const __nv_bfloat16 half = __float2bfloat16_rn(static_cast<float>(numbers[i]));
      words[i / 2] |= static_cast<uint32_t>(__bfloat16_as_ushort(half)) << (i % 2 * 16);
    }
    store_words<width * 2, cache>(words, dst);
  } else if (array.dtype == DType::kFloat) {
#pragma unroll
    for (int i = 0; i < width; ++i) words[i] = __float_as_uint(static_cast<float>(numbers[i]));
    store_words<width * 4, cache>(words, dst);
  } else if constexpr (sizeof(opmath_t) == 8 || cache == Cache::kKept) {
    // In float math, what is streamed is no double: only adam's copy may be one.
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const double number = numbers[i];
      words[2 * i] = static_cast<uint32_t>(__double2loint(number));
      words[2 * i + 1] = static_cast<uint32_t>(__double2hiint(number));
    }
    store_words<width * 8, cache>(words, dst);
  }
}

// Of a Number of kernels.h or of a step.
template <typename NumberOf>
__device__ double value_of(const NumberOf& number) {
  if (number.pointer == nullptr) return number.value;
  return number.is_double ? *static_cast<const double*>(number.pointer)
                          : *static_cast<const float*>(number.pointer);
}

}  // namespace apex_mp::cuda

// Loads and stores of numbers of any dtype, in vectors of up to 16 bytes, and the walk of a block
// over its part. dtypes are known at run time only: a branch for every vector costs nothing beside
// the memory access, and one kernel serves all mixtures of dtypes in a list. For all kernels over
// lists of tensors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/variants.h"
#include "math/split.h"

namespace apex_mp::cuda {

// The numbers of a vector, which are adjacent in memory: 16 bytes of fp32, so that the threads of a
// warp access each sector of memory once; 8 bytes of fp16, or 16 if there is no other array. In
// double math, which is rare, it is one number: more would cost all other cases registers.
template <typename opmath_t, int kArrays>
constexpr int kVector = sizeof(opmath_t) == sizeof(double) ? 1
                        : kArrays == 1                     ? 8
                                                           : 4;

// The numbers that a thread takes at once: vectors, with the vectors of the other threads between
// them. A value of this type is an argument of generic lambdas, and converts to the number of
// numbers.
template <int kWidth, int kCount>
struct Span {
  static constexpr int kStride = kWidth * kBlockSize;  // from one vector to the next
  __host__ __device__ constexpr operator int() const { return kWidth * kCount; }
};
using OneNumber = Span<1, 1>;

// Calls body(index, span) for all numbers of a part: kCount vectors at a time where vectors are
// aligned in all arrays, then one at a time; number by number before and behind.
template <int kWidth, int kCount, typename PartOf, typename Body>
__device__ void walk_vectors(const PartOf& part, const Body& body) {
  const bool aligned = part.head >= 0 && part.head < part.count;
  const int first = aligned ? part.head : part.count;
  const int vectors = (part.count - first) / kWidth;
  int vector = threadIdx.x;
#pragma unroll 1
  for (; vector < vectors - (kCount - 1) * kBlockSize; vector += kCount * kBlockSize) {
    body(first + vector * kWidth, Span<kWidth, kCount>{});
  }
  if constexpr (kCount > 1) {
#pragma unroll 1
    for (; vector < vectors; vector += kBlockSize) {
      body(first + vector * kWidth, Span<kWidth, 1>{});
    }
  }
  const int in_vectors = vectors * kWidth;
#pragma unroll 1  // A handful of numbers, or a rare case: not worth more code.
  for (int i = threadIdx.x; i < part.count - in_vectors; i += kBlockSize) {
    // In double math every number is a vector, and nothing is left for here.
    body(i < first ? i : i + in_vectors, OneNumber{});  // GCOVR_EXCL_LINE
  }
}

template <typename opmath_t, typename PartOf, typename Body>
__device__ void walk(const PartOf& part, const Body& body) {
  constexpr int kArrays = sizeof(part.arrays) / sizeof(Array);
  constexpr int kCount = sizeof(opmath_t) == sizeof(double) ? 1 : APEX_MP_VECTORS;
  walk_vectors<kVector<opmath_t, kArrays>, kCount>(part, body);
}

// `width` numbers in their own dtype. A kernel loads all arrays that it needs before it converts
// any, so that the loads run at the same time.
template <typename opmath_t, int width>
struct Raw {
  uint32_t words[width * sizeof(opmath_t) / sizeof(uint32_t)];
};

// Whether memory is likely to be read again soon; streamed data leave the caches first.
enum class Cache { kKept, kStreamed };

// Declares to the compiler that an address is one of global memory; an address that a kernel reads
// from memory could be one of shared or local memory.
template <typename T>
__device__ T* global(T* address) {
  __builtin_assume(__isGlobal(address));
  return address;
}

template <Cache cache, typename Word>
__device__ Word fetch(const Word* src) {
  if constexpr (cache == Cache::kStreamed) return __ldcs(src);
  return *global(src);
}

template <Cache cache, typename Word>
__device__ void put(Word word, Word* dst) {
  if constexpr (cache == Cache::kStreamed) {
    __stcs(dst, word);
  } else {
    *global(dst) = word;
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
    using Word = std::conditional_t<bytes == 2, uint16_t, uint8_t>;
    static_assert(bytes == sizeof(Word));
    words[0] = fetch<cache>(reinterpret_cast<const Word*>(src));
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

template <int number_bytes, Cache cache, int kWidth, int kCount>
__device__ void load_vectors(const char* src, uint32_t* words, Span<kWidth, kCount> span) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    load_words<kWidth * number_bytes, cache>(src + i * span.kStride * number_bytes,
                                             words + i * kWidth * number_bytes / 4);
  }
}

template <int number_bytes, Cache cache, int kWidth, int kCount>
__device__ void store_vectors(const uint32_t* words, char* dst, Span<kWidth, kCount> span) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    store_words<kWidth * number_bytes, cache>(words + i * kWidth * number_bytes / 4,
                                              dst + i * span.kStride * number_bytes);
  }
}

// If the array holds doubles, the caller must have chosen double math.
template <typename opmath_t, Cache cache = Cache::kKept, int kWidth, int kCount>
__device__ auto load(const Array& array, int index, Span<kWidth, kCount> span) {
  const char* src = static_cast<const char*>(array.data) + index * size_of(array.dtype);
  Raw<opmath_t, span> raw;
  if (size_of(array.dtype) == 2) {
    load_vectors<2, cache>(src, raw.words, span);
  } else if (sizeof(opmath_t) == 4 || array.dtype == DType::kFloat) {
    load_vectors<4, cache>(src, raw.words, span);
  } else {
    load_vectors<sizeof(opmath_t), cache>(src, raw.words, span);
  }
  return raw;
}

__device__ inline unsigned short half_word(const uint32_t* words, int i) {
  return static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
}

template <DType dtype, typename opmath_t, int width>
__device__ opmath_t number_at(const Raw<opmath_t, width>& raw, int i) {
  if constexpr (dtype == DType::kHalf) {
    return __half2float(__ushort_as_half(half_word(raw.words, i)));
  } else if constexpr (dtype == DType::kBFloat16) {
    return __bfloat162float(__ushort_as_bfloat16(half_word(raw.words, i)));
  } else if constexpr (dtype == DType::kFloat) {
    return __uint_as_float(raw.words[i]);
  } else {
    return __hiloint2double(static_cast<int>(raw.words[2 * i + 1]),
                            static_cast<int>(raw.words[2 * i]));
  }
}

template <DType dtype, typename opmath_t, int width>
__device__ void widen_as(const Raw<opmath_t, width>& raw, opmath_t (&numbers)[width]) {
#pragma unroll
  for (int i = 0; i < width; ++i) numbers[i] = number_at<dtype>(raw, i);
}

template <typename opmath_t, int width>
__device__ void widen(const Raw<opmath_t, width>& raw, DType dtype, opmath_t (&numbers)[width]) {
  if (dtype == DType::kHalf) {
    widen_as<DType::kHalf>(raw, numbers);
  } else if (dtype == DType::kBFloat16) {
    widen_as<DType::kBFloat16>(raw, numbers);
  } else if (sizeof(opmath_t) == 4 || dtype == DType::kFloat) {
    widen_as<DType::kFloat>(raw, numbers);
  } else if constexpr (sizeof(opmath_t) == 8) {
    widen_as<DType::kDouble>(raw, numbers);
  }
}

template <typename opmath_t, int width, typename SpanOf>
__device__ void read(const Array& array, int index, SpanOf span, opmath_t (&numbers)[width]) {
  widen(load<opmath_t>(array, index, span), array.dtype, numbers);
}

// The same for a dtype that is known when the kernel is compiled.
template <DType dtype, typename opmath_t, int width, typename SpanOf>
__device__ void read_as(const char* data, int index, SpanOf span, opmath_t (&numbers)[width]) {
  constexpr int kBytes = static_cast<int>(size_of(dtype));
  Raw<opmath_t, width> raw;
  load_vectors<kBytes, Cache::kKept>(data + index * kBytes, raw.words, span);
  widen_as<dtype>(raw, numbers);
}

// Stores numbers; from double to a half type by way of float, as torch converts.
template <Cache cache = Cache::kKept, typename opmath_t, int width, typename SpanOf>
__device__ void store(const opmath_t (&numbers)[width], const Array& array, int index,
                      SpanOf span) {
  char* dst = static_cast<char*>(array.data) + index * size_of(array.dtype);
  uint32_t words[2 * width] = {};
  if (array.dtype == DType::kHalf) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const __half half = __float2half_rn(static_cast<float>(numbers[i]));
      words[i / 2] |= static_cast<uint32_t>(__half_as_ushort(half)) << (i % 2 * 16);
    }
    store_vectors<2, cache>(words, dst, span);
  } else if (array.dtype == DType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const __nv_bfloat16 half = __float2bfloat16_rn(static_cast<float>(numbers[i]));
      words[i / 2] |= static_cast<uint32_t>(__bfloat16_as_ushort(half)) << (i % 2 * 16);
    }
    store_vectors<2, cache>(words, dst, span);
  } else if (array.dtype == DType::kFloat) {
#pragma unroll
    for (int i = 0; i < width; ++i) words[i] = __float_as_uint(static_cast<float>(numbers[i]));
    store_vectors<4, cache>(words, dst, span);
  } else if constexpr (sizeof(opmath_t) == 8 || cache == Cache::kKept) {
    // In float math, what is streamed is no double: only a copy may be one.
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const double number = numbers[i];
      words[2 * i] = static_cast<uint32_t>(__double2loint(number));
      words[2 * i + 1] = static_cast<uint32_t>(__double2hiint(number));
    }
    store_vectors<8, cache>(words, dst, span);
  }
}

// Rounds numbers to what a load would return after store().
template <typename opmath_t, int width>
__device__ void round_as_stored(DType dtype, opmath_t (&numbers)[width]) {
#pragma unroll
  for (opmath_t& number : numbers) {
    const auto narrow = static_cast<float>(number);
    if (dtype == DType::kHalf) number = __half2float(__float2half_rn(narrow));
    if (dtype == DType::kBFloat16) number = __bfloat162float(__float2bfloat16_rn(narrow));
    if (dtype == DType::kFloat) number = narrow;
  }
}

__device__ inline void split(float master, DType dtype, uint32_t& weight, uint32_t& remainder) {
  if (dtype == DType::kHalf) {
    const __half half = __float2half_rn(master);
    math::split_float16(master, uint32_t{__half_as_ushort(half)}, __half2float(half), weight,
                        remainder);
  } else {
    math::split_bfloat16(math::bits_of(master), weight, remainder);
  }
}

__device__ inline float held(float master, float weight, DType dtype) {
  const float half = __half2float(__float2half_rn(master));
  const bool rounds = dtype == DType::kHalf ? math::rounds_to_float16(master, half, weight)
                                            : math::rounds_to_bfloat16(master, weight);
  return math::held_if(rounds, master, weight);
}

__device__ inline float join(float weight, uint16_t remainder, DType dtype) {
  const auto floats = static_cast<uint32_t>(static_cast<int16_t>(remainder));
  if (dtype == DType::kBFloat16) return math::join_bfloat16(weight, floats);
  return held(math::join_float16(weight, floats), weight, DType::kHalf);
}

// What is beside the parameters of a step: remainders, or the weights of whole masters if these
// count; else nothing is loaded.
template <typename opmath_t, Cache cache = Cache::kKept, int kWidth, int kCount>
__device__ auto load_beside(const Array& copy, bool counts, int index, Span<kWidth, kCount> span) {
  Raw<opmath_t, span> raw = {};
  if (counts || copy.dtype == DType::kRemainder) {
    load_vectors<2, cache>(static_cast<const char*>(copy.data) + index * 2, raw.words, span);
  }
  return raw;
}

// Turns `numbers`, weights with their remainders beside them, into masters.
template <typename opmath_t, int width>
__device__ void join_masters(const Raw<opmath_t, width>& raw, DType weights,
                             opmath_t (&numbers)[width]) {
#pragma unroll
  for (int i = 0; i < width; ++i) {
    numbers[i] = join(static_cast<float>(numbers[i]), half_word(raw.words, i), weights);
  }
}

// The same for whole masters, with their weights beside them.
template <typename opmath_t, int width>
__device__ void hold_masters(const Raw<opmath_t, width>& raw, DType weights,
                             opmath_t (&numbers)[width]) {
#pragma unroll
  for (int i = 0; i < width; ++i) {
    const opmath_t weight = weights == DType::kHalf ? number_at<DType::kHalf>(raw, i)
                                                    : number_at<DType::kBFloat16>(raw, i);
    numbers[i] = held(static_cast<float>(numbers[i]), static_cast<float>(weight), weights);
  }
}

// The same for the parameters of a step, whatever is beside them.
template <typename opmath_t, int width>
__device__ void find_masters(const Raw<opmath_t, width>& raw, const Array& param, const Array& copy,
                             bool counts, opmath_t (&numbers)[width]) {
  if (copy.dtype == DType::kRemainder) {
    join_masters(raw, param.dtype, numbers);
  } else if (counts) {
    hold_masters(raw, copy.dtype, numbers);
  }
}

// The weight stays in the cache for the next forward pass; `cache` is for the remainder.
template <Cache cache, typename opmath_t, int width, typename SpanOf>
__device__ void store_split(const opmath_t (&masters)[width], const Array& weights,
                            const Array& remainders, int index, SpanOf span) {
  uint32_t weight_words[width] = {};
  uint32_t remainder_words[width] = {};
#pragma unroll
  for (int i = 0; i < width; ++i) {
    uint32_t weight;
    uint32_t remainder;
    split(static_cast<float>(masters[i]), weights.dtype, weight, remainder);
    weight_words[i / 2] |= weight << (i % 2 * 16);
    remainder_words[i / 2] |= remainder << (i % 2 * 16);
  }
  store_vectors<2, Cache::kKept>(weight_words, static_cast<char*>(weights.data) + index * 2, span);
  store_vectors<2, cache>(remainder_words, static_cast<char*>(remainders.data) + index * 2, span);
}

// The value of a Number of kernels.h or of a step.
template <typename NumberOf>
__device__ double value_of(const NumberOf& number) {
  if (number.pointer == nullptr) return number.value;
  return number.is_double ? *global(static_cast<const double*>(number.pointer))
                          : *global(static_cast<const float*>(number.pointer));
}

}  // namespace apex_mp::cuda

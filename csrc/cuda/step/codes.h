// The step of a chunk whose moments are in one byte (math/codes.h). Eight threads that are
// neighbours have the four numbers each of a block, and find its largest one by shuffles; so all
// threads of a warp work together, also where a chunk ends. For update.cu.
#pragma once

#include "cuda/loops.h"
#include "cuda/step/memory.h"
#include "math/codes.h"

namespace apex_mp::cuda {

constexpr int kCodeWidth = 4;  // numbers of a block that a thread has
constexpr int kCodeThreads = math::kCodeBlock / kCodeWidth;

// The codes and exponents of a chunk, of the state's tensor `which`.
struct Codes {
  int which;
  char* codes;
  uint8_t* exponents;
};

template <Cache cache, typename PartOf, typename opmath_t, int width, typename SpanOf>
__device__ void load_params(const PartOf& part, int index, SpanOf span, opmath_t (&params)[width],
                            opmath_t (&grads)[width]) {
  const Array& param = part.arrays[0];
  const Array& copy = part.arrays[2];
  const auto raw_param = load<opmath_t, cache>(param, index, span);
  const auto raw_rest = load_beside<opmath_t, cache>(copy, part.copy_counts, index, span);
  const auto raw_grad = load<opmath_t>(part.arrays[1], index, span);
  widen(raw_param, param.dtype, params);
  find_masters(raw_rest, param, copy, part.copy_counts, params);
  widen(raw_grad, part.arrays[1].dtype, grads);
}

template <Cache cache, typename PartOf, typename opmath_t, int width, typename SpanOf>
__device__ void store_params(const opmath_t (&params)[width], const PartOf& part, int index,
                             SpanOf span) {
  const Array& param = part.arrays[0];
  const Array& copy = part.arrays[2];
  if (copy.dtype == DType::kRemainder) {
    store_split<cache>(params, param, copy, index, span);
  } else {
    store<cache>(params, param, index, span);
    if (copy.data != nullptr) store(params, copy, index, span);
  }
}

// Decodes vectors of numbers, each in one block.
template <Cache cache, typename opmath_t, int kWidth, int kCount>
__device__ void read_codes(const Codes& from, int index, Span<kWidth, kCount> span,
                           opmath_t (&numbers)[kWidth * kCount]) {
  uint32_t words[(kWidth * kCount + 3) / 4];
  load_vectors<1, cache>(from.codes + index, words, span);
#pragma unroll
  for (int vector = 0; vector < kCount; ++vector) {
    const int block = (index + vector * span.kStride) / math::kCodeBlock;
    const uint32_t offset = math::code_offset(from.which, *global(from.exponents + block));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const int n = vector * kWidth + i;
      const uint32_t code = words[n / 4] >> (n % 4 * 8) & 0xffu;
      numbers[n] = math::decode(from.which, code, offset);
    }
  }
}

// The largest absolute value in the blocks of this thread's vectors, as the bits of a float. All
// threads of the warp must call it.
template <typename opmath_t, int kCount>
__device__ void find_largest(const opmath_t (&numbers)[kCodeWidth * kCount],
                             uint32_t (&largest)[kCount]) {
#pragma unroll
  for (int vector = 0; vector < kCount; ++vector) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kCodeWidth; ++i) {
      bits = math::larger_bits(bits, static_cast<float>(numbers[vector * kCodeWidth + i]));
    }
#pragma unroll
    for (int lanes = 1; lanes < kCodeThreads; lanes *= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, bits, lanes);
      bits = other > bits ? other : bits;
    }
    largest[vector] = bits;
  }
}

__device__ inline uint32_t encode_one(int which, float number, uint32_t exponent, uint32_t element,
                                      const math::Rounding& rounding) {
  if (exponent == math::kAllNan) return math::largest_code(which);
  const auto how =
      rounding.is_stochastic
          ? math::code_at_random(0.0f, math::half_for(which, math::random_bits(element, rounding)))
          : math::code_to_nearest(number);
  return math::encode(which, number, math::code_offset(which, exponent), how);
}

// Writes the first `count` numbers of each thread's vectors; if `kWhole`, all are there.
template <bool kWhole, Cache cache, typename opmath_t, int kCount>
__device__ void write_codes(const opmath_t (&numbers)[kCodeWidth * kCount], const Codes& to,
                            int index, Span<kCodeWidth, kCount> span, int end,
                            const StateRounding& rounding) {
  uint32_t largest[kCount];
  find_largest<opmath_t, kCount>(numbers, largest);
#pragma unroll
  for (int vector = 0; vector < kCount; ++vector) {
    const int first = index + vector * span.kStride;
    if (!kWhole && first >= end) continue;
    const uint32_t exponent = math::block_exponent(to.which, largest[vector]);
    uint32_t word[1] = {0};
#pragma unroll
    for (int i = 0; i < kCodeWidth; ++i) {
      const auto number = static_cast<float>(numbers[vector * kCodeWidth + i]);
      const uint32_t code =
          encode_one(to.which, number, exponent, rounding.first + first + i, rounding.rounding);
      word[0] |= code << (i * 8);
      if (!kWhole && first + i < end) *global(to.codes + first + i) = static_cast<char>(code);
    }
    if (kWhole) store_words<kCodeWidth, cache>(word, to.codes + first);
    if (first % math::kCodeBlock == 0) {
      *global(to.exponents + first / math::kCodeBlock) = static_cast<uint8_t>(exponent);
    }
  }
}

// Steps this thread's vectors, if they are there.
template <bool kWhole, typename Rule, Cache cache, typename opmath_t, typename SpanOf>
__device__ void step_vectors(const PartOf<Rule>& part, const Codes (&codes)[Rule::kTensors],
                             const typename Rule::template Factors<opmath_t>& factors,
                             const UnscaledGrad<opmath_t>& unscaled, const StateRounding& rounding,
                             int index, SpanOf span) {
  opmath_t tensors[Rule::kTensors][span];
  const auto step = [&](opmath_t& param, opmath_t grad, int n) {
    opmath_t numbers[Rule::kTensors];
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) numbers[i] = tensors[i][n];
    Rule::update(param, numbers, grad, factors);
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) tensors[i][n] = numbers[i];
  };
  if constexpr (kWhole) {
    opmath_t params[span];
    opmath_t grads[span];
    load_params<cache>(part, index, span, params, grads);
#pragma unroll
    for (int i = 0; i < Rule::kTensors; ++i) read_codes<cache>(codes[i], index, span, tensors[i]);
    write_unscaled(grads, unscaled, index, span);
#pragma unroll
    for (int n = 0; n < span; ++n) step(params[n], grads[n], n);
    store_params<cache>(params, part, index, span);
  } else {
#pragma unroll
    for (int n = 0; n < span; ++n) {
      const int here = index + n / kCodeWidth * span.kStride + n % kCodeWidth;
#pragma unroll
      for (int i = 0; i < Rule::kTensors; ++i) tensors[i][n] = 0;
      if (here >= part.count) continue;
      opmath_t param[1];
      opmath_t grad[1];
      load_params<cache>(part, here, OneNumber{}, param, grad);
#pragma unroll
      for (int i = 0; i < Rule::kTensors; ++i) {
        opmath_t one[1];
        read_codes<cache>(codes[i], here, OneNumber{}, one);
        tensors[i][n] = one[0];
      }
      write_unscaled(grad, unscaled, here, OneNumber{});
      step(param[0], grad[0], n);
      store_params<cache>(param, part, here, OneNumber{});
    }
  }
  // Here all threads of a block have read its exponent, since they shuffle what follows from it.
#pragma unroll
  for (int i = 0; i < Rule::kTensors; ++i) {
    write_codes<kWhole, cache>(tensors[i], codes[i], index, span, part.count, rounding);
  }
}

// Arrays of vectors are read and written at once where they are aligned, else number by number. The
// part has no state; `first` is its first number in the row.
template <typename Rule, Cache cache, typename opmath_t>
__device__ void step_codes(const PartOf<Rule>& part, const StepRow& row, int64_t first,
                           const typename Rule::template Factors<opmath_t>& factors,
                           const UnscaledGrad<opmath_t>& unscaled, const StateRounding& rounding) {
  constexpr bool kIsFloat = sizeof(opmath_t) == sizeof(float);
  constexpr Span<kCodeWidth, 1> span = {};  // With two vectors registers would spill.
  Codes codes[Rule::kTensors];
  bool aligned = part.head == 0;
#pragma unroll
  for (int i = 0; i < Rule::kTensors; ++i) {
    codes[i] = {i, static_cast<char*>(row.tensors[i]) + first,
                row.exponents[i] + first / math::kCodeBlock};
    aligned &= reinterpret_cast<uintptr_t>(codes[i].codes) % kCodeWidth == 0;
  }
  constexpr int kStep = span * kBlockSize;
#pragma unroll 1
  for (int begin = 0; begin < part.count; begin += kStep) {
    const int index = begin + static_cast<int>(threadIdx.x) * kCodeWidth;
    if constexpr (kIsFloat) {
      if (aligned && begin + kStep <= part.count) {
        step_vectors<true, Rule, cache>(part, codes, factors, unscaled, rounding, index, span);
        continue;
      }
    }
    step_vectors<false, Rule, cache>(part, codes, factors, unscaled, rounding, index, span);
  }
}

}  // namespace apex_mp::cuda

// The CPU kernels as a table of functions on raw memory, one table per instruction set.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "math/axpby.h"
#include "math/rounding.h"
#include "math/rules.h"

namespace apex_mp::cpu {

// Memory of one chunk: its start and its dtype.
template <typename void_t>
struct Array {
  void_t* data;
  DType dtype;
};
using In = Array<const void>;
using Out = Array<void>;

// Moments of one byte, and the exponents of their blocks (math/codes.h).
struct Codes {
  uint8_t* codes;
  uint8_t* exponents;
};

struct CheckResult {
  double sum_sq;
  int32_t found_inf;
};

struct StepChunk {
  Out param;
  In grad;
  Out copy;                        // data == nullptr: there is none; a kRemainder: see step::Row
  Out tensors[math::kMaxTensors];  // of state; data == nullptr: there is none
  uint8_t* exponents[math::kMaxTensors];  // of their blocks, if they are of kCode
  int64_t count;
  bool copy_counts;         // see step::Row
  math::Rounding rounding;  // of state in bfloat16 or one byte
  uint32_t first;           // where the chunk begins in its tensor, modulo 2**32
};

// `factors` points to Rule::Factors<double>.
using StepKernel = void (*)(const StepChunk& chunk, const void* factors);
using MeasureKernel = math::Measured (*)(const StepChunk& chunk, const void* factors);

struct Kernels {
  const char* level;
  CheckResult (*check)(In grad, int64_t count);
  double (*max_abs)(In grad, int64_t count);                    // NaN counts as 0
  void (*exponents)(In array, int64_t count, int32_t* counts);  // adds to math::kExponentBins
  // found_inf is about src; sum_sq is that of dst, as check() adds it up, or 0 if not `sums`.
  CheckResult (*unscale)(In src, Out dst, int64_t count, double inv_scale, bool sums);
  // Returns 1 if something it tested was not finite, else 0.
  int32_t (*axpby)(In x, In y, Out out, int64_t count, const math::Axpby<double>& factors);
  // Weights are of a half type; what is kept beside them are remainders, or whole masters in float;
  // see math/split.h.
  void (*join_masters)(In weights, In kept, float* masters, int64_t count);
  void (*split_masters)(const float* masters, Out weights, Out remainders, int64_t count);
  // Of tensor `which` of a state, from the first number of a block on, which is number `first` of
  // the tensor.
  void (*read_codes)(int which, const Codes& codes, float* dst, int64_t count);
  void (*write_codes)(int which, const float* src, const Codes& codes, int64_t count,
                      const math::Rounding& rounding, uint32_t first);
  StepKernel step[math::AllRules::kCount];
  MeasureKernel measure[math::AllRules::kCount];  // nullptr where Rule::kRatio < 0
};

// The table for the best level of this processor, or for the one that was set (level.h).
const Kernels& kernels();

}  // namespace apex_mp::cpu

// The CPU kernels as a table of functions on raw memory, one table per instruction set.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "math/adam.h"
#include "math/axpby.h"
#include "math/sgd.h"

namespace apex_mp::cpu {

// Memory of one chunk: where it starts, and what lies there.
template <typename void_t>
struct Array {
  void_t* data;
  DType dtype;
};
using In = Array<const void>;
using Out = Array<void>;

struct CheckResult {
  double sum_sq;
  int32_t found_inf;
};

struct AdamChunk {
  Out param;
  In grad;
  Out exp_avg;
  Out exp_avg_sq;
  Out copy;  // data == nullptr: no low-precision copy is wanted
  int64_t count;
};

struct SgdChunk {
  Out param;
  In grad;
  Out momentum_buffer;  // data == nullptr: there is no momentum
  Out copy;             // data == nullptr: no low-precision copy is wanted
  int64_t count;
};

struct Kernels {
  const char* level;
  CheckResult (*check)(In grad, int64_t count);
  // These two return 1 if something they tested was not finite, else 0.
  int32_t (*unscale)(In src, Out dst, int64_t count, double inv_scale);
  int32_t (*axpby)(In x, In y, Out out, int64_t count, const math::Axpby<double>& factors);
  void (*adam)(const AdamChunk& chunk, const math::AdamFactors<double>& factors);
  void (*sgd)(const SgdChunk& chunk, const math::SgdFactors<double>& factors);
};

// The table for this processor, or the one asked for (level.h).
const Kernels& kernels();

}  // namespace apex_mp::cpu

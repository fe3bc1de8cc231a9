// Joins and splits masters (math/split.h), and reads and writes moments of one byte (math/codes.h),
// outside of steps. Python calls it, through module.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace apex_mp::step {

// Computes a float32 master from a float16 or bfloat16 weight and what is kept beside it, an int16
// remainder or the float32 master itself; and back. All three have one layout on one device; the
// caller allocates the results, and `master` may be `kept`. Throws a sentence if they do not fit.
void join_master(const at::Tensor& weight, const at::Tensor& kept, const at::Tensor& master);
void split_master(const at::Tensor& master, const at::Tensor& weight, const at::Tensor& remainder);

// Moment number `which` of a state (0 or 1) as float32, and back, rounded to nearest: int8 codes
// and the uint8 exponents of their blocks. `codes` and `numbers` have one layout. Throws a sentence
// if they do not fit.
void read_codes(const at::Tensor& codes, const at::Tensor& exponents, const at::Tensor& numbers,
                int64_t which);
void write_codes(const at::Tensor& numbers, const at::Tensor& codes, const at::Tensor& exponents,
                 int64_t which);

}  // namespace apex_mp::step

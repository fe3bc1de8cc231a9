// Masters and their two parts (math/split.h), outside of steps. Python calls it, through
// module.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace apex_mp::step {

// float32 from a float16 or bfloat16 and an int16, and back. All three lie alike on one device; the
// caller has made the targets. Throws a sentence if they do not fit.
void join_master(const at::Tensor& weight, const at::Tensor& remainder, const at::Tensor& master);
void split_master(const at::Tensor& master, const at::Tensor& weight, const at::Tensor& remainder);

}  // namespace apex_mp::step

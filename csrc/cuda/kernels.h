// The CUDA kernels as functions on raw memory and a stream; operators.cpp calls them with tensors.
// The host does not wait, and nothing is allocated on the device. All pointers are to device
// memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "dtype.h"
#include "math/update_scale.h"

namespace apex_mp::cuda {

// Memory of one tensor. A kernel that only reads it casts the pointer to const.
struct Array {
  void* data;
  DType dtype;
};

// One tensor of each list of an operator; element i of one belongs to element i of the others.
template <int kArrays>
struct Row {
  Array arrays[kArrays];  // data == nullptr: there is none (a copy), or it is empty
  int64_t size;
  bool double_math;   // compute in double, not in float
  int32_t place = 0;  // of its sum in sum_sq
};

// A number that the host knows (pointer == nullptr), or one that the kernel reads.
struct Number {
  const void* pointer;
  bool is_double;  // what pointer points to; else a float
  double value;
};

// The number of sums of chunks, for which check() and unscale() need memory.
int64_t count_sums(const std::vector<Row<1>>& tensors);

struct Check {
  double* chunk_sums;
  float* found_inf;  // set to 1 if something is not finite, else left alone
  double* sum_sq;    // of each tensor, at its place
};
void check(const std::vector<Row<1>>& grads, const Check& task, cudaStream_t stream);

// Adds up the sums of squares of chunks that unscale() has left, for each tensor.
void sum_chunks(const std::vector<Row<1>>& tensors, const double* chunk_sums, double* sum_sq,
                cudaStream_t stream);

// counts: math::kExponentBins for each tensor, added to.
void exponents(const std::vector<Row<1>>& tensors, int64_t* counts, cudaStream_t stream);

struct Unscale {
  Number inv_scale;
  float* found_inf;
  double* chunk_sums;  // of the squares of dst; nullptr: they are not wanted
};
// Arrays: src, dst.
void unscale(const std::vector<Row<2>>& rows, const Unscale& task, cudaStream_t stream);

struct AxpbyTask {
  Number a;
  Number b;
  int32_t check_x;
  int32_t check_y;
  float* found_inf;
};
// Arrays: x, y, out.
void axpby(const std::vector<Row<3>>& rows, const AxpbyTask& task, cudaStream_t stream);

// Arrays: weights, remainders, masters.
void join_masters(const std::vector<Row<3>>& rows, cudaStream_t stream);
void split_masters(const std::vector<Row<3>>& rows, cudaStream_t stream);

// Moments of one byte (math/codes.h) as float32, and back, rounded to nearest.
void read_codes(const void* codes, const void* exponents, float* numbers, int64_t count, int which,
                cudaStream_t stream);
void write_codes(const float* numbers, void* codes, void* exponents, int64_t count, int which,
                 cudaStream_t stream);

struct UpdateScale {
  math::LossScaleState* state;
  const float* found_inf;
};
void update_scale(const math::LossScaleRule& rule, const UpdateScale& task, cudaStream_t stream);

}  // namespace apex_mp::cuda

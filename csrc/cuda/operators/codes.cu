// Moments of one byte (math/codes.h), outside of steps: for files, and where options change. A
// thread takes a block of numbers.
#include "math/codes.h"

#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "launch_plan.h"

namespace apex_mp::cuda {
namespace {

struct CodedTensor {
  uint8_t* codes;
  uint8_t* exponents;
  float* numbers;
  int64_t count;
  int which;
  int64_t first_block;  // of this launch
};

__global__ void __launch_bounds__(kBlockSize)
    read_codes_kernel(const __grid_constant__ CodedTensor tensor) {
  const int64_t block = tensor.first_block + int64_t{blockIdx.x} * kBlockSize + threadIdx.x;
  const Chunk chunk = chunk_of(0, block, tensor.count, math::kCodeBlock);
  if (chunk.begin >= tensor.count) return;
  const uint32_t offset = math::code_offset(tensor.which, tensor.exponents[block]);
  for (int64_t i = chunk.begin; i < chunk.begin + chunk.count; ++i) {
    tensor.numbers[i] = math::decode(tensor.which, tensor.codes[i], offset);
  }
}

__global__ void __launch_bounds__(kBlockSize)
    write_codes_kernel(const __grid_constant__ CodedTensor tensor) {
  const int64_t block = tensor.first_block + int64_t{blockIdx.x} * kBlockSize + threadIdx.x;
  const Chunk chunk = chunk_of(0, block, tensor.count, math::kCodeBlock);
  if (chunk.begin >= tensor.count) return;
  const int64_t end = chunk.begin + chunk.count;
  uint32_t largest = 0;
  for (int64_t i = chunk.begin; i < end; ++i) {
    largest = math::larger_bits(largest, tensor.numbers[i]);
  }
  const uint32_t exponent = math::block_exponent(tensor.which, largest);
  const uint32_t offset = math::code_offset(tensor.which, exponent);
  tensor.exponents[block] = static_cast<uint8_t>(exponent);
  for (int64_t i = chunk.begin; i < end; ++i) {
    const float number = tensor.numbers[i];
    const uint32_t code = exponent == math::kAllNan ? math::largest_code(tensor.which)
                                                    : math::encode(tensor.which, number, offset,
                                                                   math::code_to_nearest(number));
    tensor.codes[i] = static_cast<uint8_t>(code);
  }
}

template <typename Kernel>
void run(const Kernel& kernel, CodedTensor tensor, cudaStream_t stream) {
  const int64_t blocks = count_chunks(math::count_code_blocks(tensor.count), kBlockSize);
  for (int64_t first = 0; first < blocks; first += kMaxBlocks) {
    tensor.first_block = first * kBlockSize;
    launch(kernel, std::min(blocks - first, kMaxBlocks), stream, tensor);
  }
}

}  // namespace

void read_codes(const void* codes, const void* exponents, float* numbers, int64_t count, int which,
                cudaStream_t stream) {
  auto* bytes = static_cast<uint8_t*>(const_cast<void*>(codes));
  auto* of_blocks = static_cast<uint8_t*>(const_cast<void*>(exponents));
  run(read_codes_kernel, {bytes, of_blocks, numbers, count, which, 0}, stream);
}

void write_codes(const float* numbers, void* codes, void* exponents, int64_t count, int which,
                 cudaStream_t stream) {
  auto* bytes = static_cast<uint8_t*>(codes);
  auto* of_blocks = static_cast<uint8_t*>(exponents);
  run(write_codes_kernel, {bytes, of_blocks, const_cast<float*>(numbers), count, which, 0}, stream);
}

}  // namespace apex_mp::cuda

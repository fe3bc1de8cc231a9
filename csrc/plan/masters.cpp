// Joins and splits masters, and reads and writes codes, on their device.
#include "plan/masters.h"

#include "checks.h"
#include "cpu/tensors.h"
#include "math/codes.h"
#include "plan/row_checks.h"
#ifdef APEX_MP_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/kernels.h"
#endif

namespace apex_mp::step {
namespace {

void check(const char* caller, const at::Tensor& master, const at::Tensor& weight,
           const Argument& of_kept, const at::Tensor& kept,
           std::initializer_list<at::ScalarType> kept_as) {
  const Argument of_weight = {caller, "weight"};
  const auto check_one = [&](const Argument& argument, const at::Tensor& tensor,
                             std::initializer_list<at::ScalarType> dtypes) {
    check_device(argument, tensor, weight.device());
    apex_mp::check_dtype(argument, tensor, dtypes);
    check_dense(argument, tensor);
    check_same_layout(argument, tensor, of_weight, weight);
  };
  TORCH_CHECK(has_kernels(weight.device()), caller, ": this build has no kernels for ",
              weight.device());
  check_one(of_weight, weight, {at::kHalf, at::kBFloat16});
  check_one({caller, "master"}, master, {at::kFloat});
  check_one(of_kept, kept, kept_as);
}

void check_codes(const char* caller, const at::Tensor& codes, const at::Tensor& exponents,
                 const at::Tensor& numbers, int64_t which) {
  const Argument of_codes = {caller, "codes"};
  const Argument of_numbers = {caller, "numbers"};
  TORCH_CHECK(has_kernels(codes.device()), caller, ": this build has no kernels for ",
              codes.device());
  TORCH_CHECK_VALUE(which == 0 || which == 1, caller, ": which is ", which, "; it must be 0 or 1");
  check_dense(of_codes, codes);
  apex_mp::check_dtype(of_codes, codes, {at::kChar});
  check_device(of_numbers, numbers, codes.device());
  check_dense(of_numbers, numbers);
  apex_mp::check_dtype(of_numbers, numbers, {at::kFloat});
  check_same_layout(of_numbers, numbers, of_codes, codes);
  check_exponents(exponents, {caller, "exponents", -1, -1}, codes);
}

cpu::Codes codes_at(const at::Tensor& codes, const at::Tensor& exponents, int64_t first) {
  return {static_cast<uint8_t*>(codes.mutable_data_ptr()) + first,
          static_cast<uint8_t*>(exponents.mutable_data_ptr()) + first / math::kCodeBlock};
}

#ifdef APEX_MP_WITH_CUDA
void run(void (*kernel)(const std::vector<cuda::Row<3>>&, cudaStream_t), const at::Tensor& weight,
         const at::Tensor& remainder, const at::Tensor& master) {
  const auto array = [](const at::Tensor& tensor) {
    return cuda::Array{const_cast<void*>(tensor.const_data_ptr()), dtype_of(tensor)};
  };
  const c10::cuda::CUDAGuard guard(weight.device());
  kernel({{{array(weight), array(remainder), array(master)}, weight.numel(), false}},
         c10::cuda::getCurrentCUDAStream());
}
#endif

}  // namespace

void join_master(const at::Tensor& weight, const at::Tensor& kept, const at::Tensor& master) {
  check("join_master", master, weight, {"join_master", "kept"}, kept, {at::kShort, at::kFloat});
  auto* numbers = static_cast<float*>(master.mutable_data_ptr());
#ifdef APEX_MP_WITH_CUDA
  if (weight.device().is_cuda()) return run(&cuda::join_masters, weight, kept, master);
#endif
  const std::vector<Chunk> chunks = cpu::chunks_of(weight);
  cpu::for_each_chunk(chunks, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    cpu::kernels().join_masters(cpu::at_element(cpu::in(weight), chunk.begin),
                                cpu::at_element(cpu::in(kept), chunk.begin), numbers + chunk.begin,
                                chunk.count);
  });
}

void split_master(const at::Tensor& master, const at::Tensor& weight, const at::Tensor& remainder) {
  check("split_master", master, weight, {"split_master", "remainder"}, remainder, {at::kShort});
  const cpu::Out weights = cpu::out(weight);
  const cpu::Out remainders = cpu::out(remainder);
#ifdef APEX_MP_WITH_CUDA
  if (weight.device().is_cuda()) return run(&cuda::split_masters, weight, remainder, master);
#endif
  const auto* numbers = static_cast<const float*>(master.const_data_ptr());
  const std::vector<Chunk> chunks = cpu::chunks_of(weight);
  cpu::for_each_chunk(chunks, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    cpu::kernels().split_masters(numbers + chunk.begin, cpu::at_element(weights, chunk.begin),
                                 cpu::at_element(remainders, chunk.begin), chunk.count);
  });
}

void read_codes(const at::Tensor& codes, const at::Tensor& exponents, const at::Tensor& numbers,
                int64_t which) {
  check_codes("read_codes", codes, exponents, numbers, which);
  auto* dst = static_cast<float*>(numbers.mutable_data_ptr());
#ifdef APEX_MP_WITH_CUDA
  if (codes.device().is_cuda()) {
    const c10::cuda::CUDAGuard guard(codes.device());
    return cuda::read_codes(codes.const_data_ptr(), exponents.const_data_ptr(), dst, codes.numel(),
                            static_cast<int>(which), c10::cuda::getCurrentCUDAStream());
  }
#endif
  const std::vector<Chunk> chunks = cpu::chunks_of(codes);
  cpu::for_each_chunk(chunks, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    cpu::kernels().read_codes(static_cast<int>(which), codes_at(codes, exponents, chunk.begin),
                              dst + chunk.begin, chunk.count);
  });
}

void write_codes(const at::Tensor& numbers, const at::Tensor& codes, const at::Tensor& exponents,
                 int64_t which) {
  check_codes("write_codes", codes, exponents, numbers, which);
  const auto* src = static_cast<const float*>(numbers.const_data_ptr());
#ifdef APEX_MP_WITH_CUDA
  if (codes.device().is_cuda()) {
    const c10::cuda::CUDAGuard guard(codes.device());
    return cuda::write_codes(src, codes.mutable_data_ptr(), exponents.mutable_data_ptr(),
                             codes.numel(), static_cast<int>(which),
                             c10::cuda::getCurrentCUDAStream());
  }
#endif
  const std::vector<Chunk> chunks = cpu::chunks_of(codes);
  cpu::for_each_chunk(chunks, [&](int64_t index) {
    const Chunk& chunk = chunks[index];
    cpu::kernels().write_codes(static_cast<int>(which), src + chunk.begin,
                               codes_at(codes, exponents, chunk.begin), chunk.count,
                               math::Rounding{}, 0);
  });
}

}  // namespace apex_mp::step

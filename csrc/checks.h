// Argument checks of all backends. Each raises an error of one sentence, which names the operator,
// the list, the index, the value and what it must be. An operator makes all checks before it writes
// anything.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <string>

namespace apex_mp {

// An argument by name: "found_inf", or "grads[3]".
struct Argument {
  const char* op;
  const char* name;
  int64_t index = -1;
};

inline std::ostream& operator<<(std::ostream& out, const Argument& argument) {
  out << argument.op << ": " << argument.name;
  if (argument.index >= 0) out << '[' << argument.index << ']';
  return out;
}

inline void check_same_length(const char* op, const char* name, size_t length,
                              const char* other_name, size_t other_length) {
  TORCH_CHECK(length == other_length, op, ": ", name, " has ", length, " tensors, ", other_name,
              " has ", other_length, "; they must match");
}

inline void check_dtype(const Argument& argument, const at::Tensor& tensor,
                        std::initializer_list<at::ScalarType> allowed) {
  std::string wish;
  for (const at::ScalarType dtype : allowed) {
    if (tensor.scalar_type() == dtype) return;
    if (!wish.empty()) wish += " or ";
    wish += c10::toString(dtype);
  }
  TORCH_CHECK(false, argument, " is of dtype ", tensor.scalar_type(), "; it must be ", wish);
}

inline void check_floating(const Argument& argument, const at::Tensor& tensor) {
  check_dtype(argument, tensor, {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble});
}

inline void check_device(const Argument& argument, const at::Tensor& tensor,
                         const at::Device& device) {
  TORCH_CHECK(tensor.device() == device, argument, " is on ", tensor.device(),
              "; all tensors of this call must be on ", device);
}

// Memory that a kernel may walk from data_ptr() on: every element once, without gaps.
inline void check_dense(const Argument& argument, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, argument, " is ", tensor.layout(),
              "; it must be a dense (strided) tensor");
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), argument, " has sizes ", tensor.sizes(),
              " and strides ", tensor.strides(),
              "; its elements must lie in memory without gaps or overlap, make it contiguous()");
}

// Element i of one must be element i of the other in memory: equal numbers of elements, and either
// both contiguous or with equal strides (such as channels_last).
inline void check_same_layout(const Argument& argument, const at::Tensor& tensor,
                              const Argument& other_argument, const at::Tensor& other) {
  TORCH_CHECK(tensor.numel() == other.numel(), argument, " has ", tensor.numel(), " elements, ",
              other_argument.name, '[', other_argument.index, "] has ", other.numel(),
              "; they must match");
  if (tensor.is_contiguous() && other.is_contiguous()) return;
  bool same = tensor.sizes() == other.sizes();
  for (int64_t dim = 0; same && dim < tensor.dim(); ++dim) {
    same = tensor.size(dim) == 1 || tensor.stride(dim) == other.stride(dim);
  }
  TORCH_CHECK(same, argument, " has sizes ", tensor.sizes(), " and strides ", tensor.strides(),
              ", ", other_argument.name, '[', other_argument.index, "] has ", other.sizes(),
              " and ", other.strides(), "; they must lie in memory in the same order");
}

// Dispatch treats fake tensors, wrappers and lazy negations separately, but not those in an
// optional list. A kernel would read their memory, or nullptr, as it is.
inline void check_has_memory(const Argument& argument, const at::Tensor& tensor) {
  const bool empty = tensor.numel() == 0;
  TORCH_CHECK(
      !tensor.is_neg() && (empty || (tensor.has_storage() && tensor.storage().data() != nullptr)),
      argument, " is a tensor whose numbers do not lie in its memory; clone() it");
}

// An operator may write to the memory that it reads, element by element. If memory overlaps in
// another way, results would depend on the order of threads and vectors.
inline void check_same_or_apart(const Argument& argument, const at::Tensor& written,
                                const Argument& other_argument, const at::Tensor& read) {
  const auto begin = reinterpret_cast<uintptr_t>(written.const_data_ptr());
  const auto other_begin = reinterpret_cast<uintptr_t>(read.const_data_ptr());
  const bool same = begin == other_begin && written.element_size() == read.element_size();
  const bool apart = written.numel() == 0 || begin + written.nbytes() <= other_begin ||
                     other_begin + read.nbytes() <= begin;
  TORCH_CHECK(same || apart, argument, " overlaps ", other_argument.name, '[', other_argument.index,
              "]; they must be the same memory or lie apart");
}

// An operator has no derivative, so it must not write to a tensor that autograd tracks.
inline void check_writable(const Argument& argument, const at::Tensor& tensor) {
  TORCH_CHECK(!(at::GradMode::is_enabled() && tensor.requires_grad()), argument,
              " requires grad; call this operator under torch.no_grad()");
}

// One element of lists: floating, dense, on the device of the call.
inline void check_element(const Argument& argument, const at::Tensor& tensor,
                          const at::Device& device) {
  check_device(argument, tensor, device);
  check_floating(argument, tensor);
  check_dense(argument, tensor);
}

// Checks for one number in memory of the device.
inline void check_one_element(const Argument& argument, const at::Tensor& tensor,
                              const at::Device& device,
                              std::initializer_list<at::ScalarType> allowed) {
  check_device(argument, tensor, device);
  check_dtype(argument, tensor, allowed);
  TORCH_CHECK(tensor.numel() == 1, argument, " has ", tensor.numel(), " elements; it must have 1");
}

// One number that is only read: on the device, or on the CPU, where the host reads it at once.
inline void check_number(const Argument& argument, const at::Tensor& tensor,
                         const at::Device& device) {
  check_one_element(argument, tensor, tensor.is_cpu() ? at::Device(at::kCPU) : device,
                    {at::kFloat, at::kDouble});
}

// Autograd compares versions to notice that a tensor it saved was written since.
inline void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

inline void bump_versions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) bump_version(tensor);
}

}  // namespace apex_mp

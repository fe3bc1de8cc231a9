// Whether a step may walk the memory of a tensor: a quick test, and checks that throw a sentence.
// For the plan and all files that read tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace apex_mp::step {

// The place of a tensor in the caller's lists: item `index` of the list of group `group`, or of the
// only list if that is -1.
struct Place {
  const char* caller;  // the optimizer's name
  const char* list;
  int64_t group;
  int64_t index;

  // The same item of another list.
  Place in(const char* other_list) const { return {caller, other_list, group, index}; }
};

// Tensors whose memory does not hold their numbers: DTensor, FakeTensor, lazy negation and others.
constexpr c10::DispatchKeySet kForeign({c10::DispatchKey::Python, c10::DispatchKey::Negative,
                                        c10::DispatchKey::ZeroTensor,
                                        c10::DispatchKey::Functionalize,
                                        c10::DispatchKey::FuncTorchBatched,
                                        c10::DispatchKey::FuncTorchGradWrapper});

// Whether this build has kernels for tensors there.
inline bool has_kernels(const at::Device& device) {
#ifdef APEX_MP_WITH_CUDA
  if (device.is_cuda()) return true;
#endif
  return device.is_cpu();
}

inline bool is_floating(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kDouble;
}

inline bool is_plain(const at::Tensor& tensor) {
  return is_floating(tensor) && tensor.layout() == at::kStrided &&
         !tensor.key_set().has_any(kForeign) && tensor.is_non_overlapping_and_dense();
}

// Element i of one is element i of the other in memory.
inline bool lie_alike(const at::Tensor& one, const at::Tensor& other) {
  if (one.is_contiguous() && other.is_contiguous()) return one.numel() == other.numel();
  return one.sizes() == other.sizes() && one.strides() == other.strides();
}

// Throws a sentence that names the place, unless the tensor is plain.
void check_param(const at::Tensor& tensor, const Place& place);

// Likewise, unless it is on the parameter's device, with its size and memory order.
void check_peer(const at::Tensor& tensor, const Place& place, const at::Tensor& param,
                const Place& param_place);

// Likewise, but the memory order may differ if the shapes are equal.
void check_peer_but_order(const at::Tensor& tensor, const Place& place, const at::Tensor& param,
                          const Place& param_place);

// Likewise, for the remainder of a master, or codes of one byte.
void check_integers(const at::Tensor& tensor, const Place& place, const at::Tensor& param,
                    const Place& param_place);

// Throws a sentence unless there is one exponent for each block of a parameter's codes.
void check_exponents(const at::Tensor& tensor, const Place& place, const at::Tensor& param);

// Likewise, unless it is of this dtype.
void check_dtype(const at::Tensor& tensor, const Place& place, at::ScalarType dtype);

// Likewise, unless it is one float32 on the device.
void check_number_of_state(const at::Tensor& tensor, const Place& place, const at::Device& device);

}  // namespace apex_mp::step

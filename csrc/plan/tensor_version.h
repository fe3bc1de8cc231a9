// A tensor as it was at some time: shows whether it was written or replaced since. For the classes
// that compare gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

namespace apex_mp::step {

// Owns no tensor, but the tensor's version counter, which each write increments. Another tensor at
// the same address has another counter, because this one is still there.
class TensorVersion {
 public:
  TensorVersion() = default;  // of no tensor

  // Not of an inference tensor, which has no version.
  explicit TensorVersion(const at::Tensor& tensor)
      : tensor_(tensor.unsafeGetTensorImpl()),
        data_(data_of(tensor)),
        counter_(tensor_->version_counter()),
        version_(counter_.current_version()) {}

  // Whether this is the tensor, and it was not written since.
  bool is(const at::Tensor& tensor) const {
    const at::TensorImpl* now = tensor.unsafeGetTensorImpl();
    return now == tensor_ && data_of(tensor) == data_ && !tensor.is_inference() &&
           is_same(now->version_counter(), counter_) && counter_.current_version() == version_;
  }
  bool is_empty() const { return tensor_ == nullptr; }

 private:
  static const void* data_of(const at::Tensor& tensor) {
    return tensor.has_storage() ? tensor.storage().data() : nullptr;
  }
  // A counter cannot be asked which it is, but it holds nothing else than a pointer.
  static bool is_same(const c10::VariableVersion& one, const c10::VariableVersion& other) {
    static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
    return std::memcmp(&one, &other, sizeof(one)) == 0;
  }

  const at::TensorImpl* tensor_ = nullptr;
  const void* data_ = nullptr;
  c10::VariableVersion counter_;
  int64_t version_ = 0;
};

}  // namespace apex_mp::step

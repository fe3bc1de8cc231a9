// The memory of the tensors of one row: by quick tests for usual tensors, else by careful ones. For
// the plan.
#pragma once

#include "plan/row_checks.h"
#include "plan/state.h"
#include "plan/task.h"
#include "tensor_facts.h"

namespace apex_mp::step {

// The tensors that one parameter's step works on; borrowed.
struct RowTensors {
  const at::Tensor* param = nullptr;          // what is stepped: the parameter, or its master
  const at::Tensor* grad = nullptr;           // nullptr: there is none, and nothing is stepped
  const at::Tensor* param_of_grad = nullptr;  // then: whose gradient, when there is one, it will be
  const at::Tensor* copy = nullptr;           // nullptr: there is none
  const at::Tensor* tensors[math::kMaxTensors] = {};    // of state; nullptr: there is none
  const at::Tensor* exponents[math::kMaxTensors] = {};  // beside tensors of one byte
  const at::Tensor* numbers[math::kMaxNumbers] = {};
  size_t position = 0;  // of the parameter, among all of the optimizer
  int32_t group = 0;
  bool scaled = true;
  bool writes_grad = false;
  bool has_whole_master = false;  // in the state

  // Takes the tensors from a complete state. With a master a low-precision parameter is its copy,
  // or a part of it.
  void take(const State& state, const RequiredState& required, const at::Tensor& own) {
    const Masters masters = required.masters;
    param = masters == Masters::kFloat ? &tensor_of(state.master) : &own;
    if (masters == Masters::kFloat) copy = &own;
    if (masters == Masters::kSplit) copy = &tensor_of(state.master);
    has_whole_master = masters == Masters::kFloat;
    for (int i = 0; i < required.tensors; ++i) {
      tensors[i] = &tensor_of(state.tensors[i]);
      if (tensors[i]->scalar_type() == at::kChar) exponents[i] = &tensor_of(state.exponents[i]);
    }
    for (int i = 0; i < math::kMaxNumbers; ++i) {
      // A number that may be missing belongs to the tensors: without them it is not used.
      const bool has_use = i < required.numbers || required.tensors > 0;
      if (has_use && state.numbers[i] != nullptr) numbers[i] = &tensor_of(state.numbers[i]);
    }
  }

  // Calls visit(tensor) for each tensor that the step writes.
  template <typename Visit>
  void each_written(const Visit& visit) const {
    if (grad == nullptr) return;
    visit(*param);
    for (const at::Tensor* tensor :
         {copy, tensors[0], tensors[1], exponents[0], exponents[1], numbers[0], numbers[1]}) {
      if (tensor != nullptr) visit(*tensor);
    }
    if (writes_grad) visit(*grad);
  }
};

// Prefetches the storages of some rows, which are scattered in memory: saves a few per cent of the
// walk.
inline void fetch_storages(const RowTensors& row) {
#if defined(__GNUC__)
  const auto fetch = [](const at::Tensor& tensor) {
    __builtin_prefetch(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  };
  row.each_written(fetch);
  fetch(*row.grad);
#endif
}

inline Array array_of(const at::Tensor& tensor, const void* storage) {
  const DType dtype = dtype_of(tensor);
  char* begin = static_cast<char*>(const_cast<void*>(storage));
  return {begin + tensor.storage_offset() * any_size_of(dtype), dtype};
}

// For a tensor that passed the checks, which data_ptr() would repeat. A lazy clone that is only
// read stays shared.
inline Array to_read(const at::Tensor& tensor) {
  return array_of(tensor, tensor.unsafeGetTensorImpl()->unsafe_storage().data());
}

inline Array to_write(const at::Tensor& tensor) {
  return array_of(tensor, tensor.unsafeGetTensorImpl()->unsafe_storage().mutable_data());
}

inline Array to_write(const at::Tensor* tensor) {
  return tensor == nullptr ? Array{nullptr, DType::kHalf} : to_write(*tensor);
}

inline Array grad_of(const RowTensors& row) {
  if (row.grad == nullptr) return {nullptr, dtype_of(*row.param_of_grad)};
  Array grad = row.writes_grad ? to_write(*row.grad) : to_read(*row.grad);
  // An empty gradient lies nowhere, which is to say on CUDA that there is none.
  static char somewhere;
  if (grad.data == nullptr) grad.data = &somewhere;
  return grad;
}

inline Row memory_of(const RowTensors& row) {
  Row memory = {to_write(*row.param),
                grad_of(row),
                to_write(row.copy),
                {},
                {},
                {},
                row.param->numel(),
                row.group,
                static_cast<int32_t>(row.position),
                row.scaled,
                row.writes_grad,
                row.has_whole_master};
  for (int i = 0; i < math::kMaxTensors; ++i) {
    memory.tensors[i] = to_write(row.tensors[i]);
    if (row.exponents[i] == nullptr) continue;
    memory.exponents[i] = static_cast<uint8_t*>(row.exponents[i]->mutable_data_ptr());
  }
  for (int i = 0; i < math::kMaxNumbers; ++i) {
    memory.numbers[i] = static_cast<float*>(to_write(row.numbers[i]).data);
  }
  return memory;
}

// Whether every tensor is contiguous and has the parameter's size, a valid dtype and the
// parameter's dispatch keys (so it is as plain, and on the same type of device). Takes a few
// instructions for each tensor. If false, careful tests must follow.
class QuickTest {
 public:
  QuickTest(const at::Tensor& param, const RequiredState& required)
      : param_(param),
        keys_(param.key_set()),
        size_(param.numel()),
        required_(required),
        passes_(is_plain(param) && param.is_contiguous()) {}

  bool passes(const RowTensors& row) const {
    if (!passes_ || !is_param_or_master(*row.param) || !is_usual_grad(row)) return false;
    if (row.copy != nullptr && !(is_like_param(*row.copy) && is_copy(*row.copy))) return false;
    for (const at::Tensor* tensor : row.tensors) {
      if (!is_usual_tensor(tensor)) return false;
    }
    for (const at::Tensor* each : row.exponents) {
      if (!is_usual_exponents(each)) return false;
    }
    for (const at::Tensor* number : row.numbers) {
      if (!is_usual_number(number)) return false;
    }
    return true;
  }

 private:
  bool is_usual_grad(const RowTensors& row) const {
    return row.grad == nullptr || (is_like_param(*row.grad) && is_floating(*row.grad));
  }

  static bool is_copy(const at::Tensor& tensor) {
    return is_floating(tensor) || tensor.scalar_type() == at::kShort;
  }

  bool is_usual_tensor(const at::Tensor* tensor) const {
    return tensor == nullptr || (is_like_param(*tensor) && required_.takes(tensor->scalar_type()));
  }

  bool is_usual_exponents(const at::Tensor* tensor) const {
    return tensor == nullptr ||
           (tensor->scalar_type() == at::kByte && is_where_param_is(*tensor) &&
            tensor->is_contiguous() && tensor->numel() == math::count_code_blocks(size_));
  }

  bool is_usual_number(const at::Tensor* number) const {
    return number == nullptr || (number->scalar_type() == at::kFloat && number->numel() == 1 &&
                                 is_where_param_is(*number));
  }

  bool is_param_or_master(const at::Tensor& stepped) const {
    return &stepped == &param_ || (is_like_param(stepped) && stepped.scalar_type() == at::kFloat);
  }

  bool is_like_param(const at::Tensor& tensor) const {
    return tensor.numel() == size_ && tensor.is_contiguous() && is_where_param_is(tensor);
  }

  bool is_where_param_is(const at::Tensor& tensor) const {
    return tensor.key_set() == keys_ && (tensor.is_cpu() || tensor.device() == param_.device());
  }

  const at::Tensor& param_;
  const c10::DispatchKeySet keys_;
  const int64_t size_;
  const RequiredState& required_;
  const bool passes_;
};

}  // namespace apex_mp::step

// The memory of the tensors of one row: quickly where they lie as nearly all do, else carefully.
#pragma once

#include "step/adam_state.h"
#include "step/row_checks.h"
#include "step/task.h"
#include "tensor_facts.h"

namespace apex_mp::step {

// The tensors that one parameter's step works on; borrowed.
struct RowTensors {
  const at::Tensor* param = nullptr;          // what is stepped: the parameter, or its master
  const at::Tensor* grad = nullptr;           // nullptr: there is none, and nothing is stepped
  const at::Tensor* param_of_grad = nullptr;  // then: whose gradient, when there is one, it will be
  const at::Tensor* exp_avg = nullptr;
  const at::Tensor* exp_avg_sq = nullptr;
  const at::Tensor* copy = nullptr;  // nullptr: there is none
  const at::Tensor* step = nullptr;
  int32_t group = 0;
  bool scaled = true;
  bool writes_grad = false;

  // What is stepped, from a state that is complete: a low-precision parameter may be its copy.
  void take(const AdamState& state, const at::Tensor& own, bool with_master) {
    param = with_master ? &tensor_of(state.master_param) : &own;
    exp_avg = &tensor_of(state.exp_avg);
    exp_avg_sq = &tensor_of(state.exp_avg_sq);
    step = &tensor_of(state.step);
    if (with_master) copy = &own;
  }

  // Calls visit(tensor) for each tensor that the step writes.
  template <typename Visit>
  void each_written(const Visit& visit) const {
    if (grad == nullptr) return;
    for (const at::Tensor* tensor : {param, exp_avg, exp_avg_sq, step}) visit(*tensor);
    if (copy != nullptr) visit(*copy);
    if (writes_grad) visit(*grad);
  }
};

// Storages lie all over memory. To ask for those of some rows before the first is looked at saves a
// few per cent of the walk.
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
  return {begin + tensor.storage_offset() * size_of(dtype), dtype};
}

// Of a tensor that passed the checks, which data_ptr() would make once more. A lazy clone that is
// only read stays shared.
inline Array to_read(const at::Tensor& tensor) {
  return array_of(tensor, tensor.unsafeGetTensorImpl()->unsafe_storage().data());
}

inline Array to_write(const at::Tensor& tensor) {
  return array_of(tensor, tensor.unsafeGetTensorImpl()->unsafe_storage().mutable_data());
}

inline Array grad_of(const RowTensors& row, void* not_null) {
  if (row.grad == nullptr) return {nullptr, dtype_of(*row.param_of_grad)};
  Array grad = row.writes_grad ? to_write(*row.grad) : to_read(*row.grad);
  // An empty gradient lies nowhere, which is to say on CUDA that there is none.
  if (grad.data == nullptr) grad.data = not_null;
  return grad;
}

inline Row memory_of(const RowTensors& row) {
  const Array none = {nullptr, DType::kHalf};
  float* step = static_cast<float*>(to_write(*row.step).data);
  return {to_write(*row.param),
          grad_of(row, step),
          to_write(*row.exp_avg),
          to_write(*row.exp_avg_sq),
          row.copy == nullptr ? none : to_write(*row.copy),
          step,
          row.param->numel(),
          row.group,
          row.scaled,
          row.writes_grad};
}

// Whether every tensor is contiguous, as large as the parameter, of a fitting dtype and of the
// parameter's dispatch keys, that is, as plain and on the same type of device: a few instructions
// for each. False says nothing yet.
class QuickTest {
 public:
  explicit QuickTest(const at::Tensor& param)
      : param_(param),
        keys_(param.key_set()),
        size_(param.numel()),
        moments_(param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
        passes_(is_plain(param) && param.is_contiguous()) {}

  bool passes(const RowTensors& row) const {
    return passes_ && is_param_or_master(*row.param) && is_usual_grad(row) &&
           is_like_param(*row.exp_avg) && row.exp_avg->scalar_type() == moments_ &&
           is_like_param(*row.exp_avg_sq) && row.exp_avg_sq->scalar_type() == moments_ &&
           (row.copy == nullptr || (is_like_param(*row.copy) && is_floating(*row.copy))) &&
           row.step->scalar_type() == at::kFloat && row.step->numel() == 1 &&
           is_where_param_is(*row.step);
  }

 private:
  bool is_usual_grad(const RowTensors& row) const {
    return row.grad == nullptr || (is_like_param(*row.grad) && is_floating(*row.grad));
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
  const at::ScalarType moments_;
  const bool passes_;
};

}  // namespace apex_mp::step

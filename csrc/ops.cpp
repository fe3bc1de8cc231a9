// The schema of every operator, in the order a step meets them. All write into their arguments and
// return nothing, so that torch.compile needs no rule for the shape of a result.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>

TORCH_LIBRARY(apex_mp, m) {
  // found_inf[0] = 1 if a gradient holds inf or NaN; sum_sq[places[i]] = sum of squares of
  // grads[i].
  m.def("check_(Tensor[] grads, int[] places, Tensor(a!) found_inf, Tensor(b!) sum_sq) -> ()");

  // dst[i] = src[i] * inv_scale; src and dst may be the same list. sum_sq[places[i]] = sum of
  // squares of dst[i].
  m.def(
      "unscale_(Tensor[] src, Tensor(a!)[] dst, Tensor inv_scale, Tensor(b!) found_inf, "
      "int[] places=[], Tensor(c!)? sum_sq=None) -> ()");

  // out[i] = a * x[i] + b * y[i]; `tested` says whose inf and NaN count: -1 both, 0 x, 1 y.
  m.def(
      "axpby_(Tensor[] x, Tensor[] y, Tensor(a!)[] out, Tensor a, Tensor b, Tensor(b!) found_inf, "
      "int tested=-1) -> ()");

  // counts[i][bin] += how many numbers of tensors[i] lie in a power of two; math/exponent.h has the
  // bins.
  m.def("exponents_(Tensor[] tensors, Tensor(a!) counts) -> ()");

  // Updates a dynamic loss scale, by the rule of apex_mp.loss_scale.DynamicLossScale.
  m.def("update_scale_(Tensor(a!) state, float[] rule, Tensor found_inf) -> ()");
}

namespace {

bool is_sparse(const at::Tensor& tensor) { return tensor.layout() != at::kStrided; }

// The sparse argument of a call, as an error message names it: "grads[3]"; empty: there is none.
std::string sparse_argument(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = stack[stack.size() - count + i];
    const std::string& name = schema.arguments()[i].name();
    if (value.isTensor() && is_sparse(value.toTensor())) return name;
    if (!value.isTensorList()) continue;
    const c10::List<at::Tensor> list = value.toTensorList();
    for (size_t index = 0; index < list.size(); ++index) {
      if (is_sparse(list.get(index))) return name + '[' + std::to_string(index) + ']';
    }
  }
  return {};
}

// Raises an error of one sentence in place of the dispatcher's long message.
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string name = schema.name().substr(schema.name().rfind(':') + 1);
  const std::string sparse = sparse_argument(schema, *stack);
  TORCH_CHECK(sparse.empty(), name, ": ", sparse,
              " is a sparse tensor; it must be a dense (strided) tensor");
  TORCH_CHECK(false, name, ": an argument is a ", c10::toString(keys.highestPriorityTypeId()),
              " tensor, for which this build of apex_mp has no kernels. To build those for CUDA: "
              "FORCE_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps .");
}

void refuse_all(torch::Library& m) {
  for (const char* name : {"check_", "unscale_", "axpby_", "exponents_", "update_scale_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(apex_mp, SparseCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(apex_mp, SparseCsrCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(apex_mp, SparseCUDA, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(apex_mp, SparseCsrCUDA, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(apex_mp, MPS, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(apex_mp, XPU, m) { refuse_all(m); }
#ifndef APEX_MP_WITH_CUDA
TORCH_LIBRARY_IMPL(apex_mp, CUDA, m) { refuse_all(m); }
#endif

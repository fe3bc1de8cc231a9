// The error messages for tensors that a step cannot take.
#include "plan/row_checks.h"

#include <string>

#include "checks.h"
#include "math/codes.h"

namespace apex_mp::step {
namespace {

// The name of a list of a group, as a message shows it; it must outlive the Argument made of it.
std::string list_name(const Place& place) {
  if (place.group < 0) return place.list;
  return place.list + ('[' + std::to_string(place.group) + ']');
}

void check_numbers_in_memory(const Argument& argument, const at::Tensor& tensor) {
  const c10::DispatchKeySet foreign = tensor.key_set() & kForeign;
  TORCH_CHECK_TYPE(foreign.empty(), argument, " has the dispatch key ",
                   c10::toString(foreign.highestPriorityTypeId()),
                   ": it is a DTensor, a FakeTensor or another wrapper, whose numbers do not lie "
                   "in its memory; step plain tensors, for example DTensor.to_local()");
}

void check_as_argument(const Argument& argument, const at::Tensor& tensor) {
  check_numbers_in_memory(argument, tensor);
  check_floating(argument, tensor);
  check_dense(argument, tensor);
}

}  // namespace

void check_param(const at::Tensor& tensor, const Place& place) {
  if (is_plain(tensor)) return;
  const std::string name = list_name(place);
  check_as_argument({place.caller, name.c_str(), place.index}, tensor);
}

void check_peer(const at::Tensor& tensor, const Place& place, const at::Tensor& param,
                const Place& param_place) {
  if (is_plain(tensor) && tensor.device() == param.device() && lie_alike(tensor, param)) return;
  const std::string name = list_name(place);
  const std::string param_name = list_name(param_place);
  const Argument argument = {place.caller, name.c_str(), place.index};
  check_numbers_in_memory(argument, tensor);
  TORCH_CHECK(tensor.device() == param.device(), argument, " is on ", tensor.device(), ", ",
              param_name, '[', param_place.index, "] on ", param.device(),
              "; they must be on one device");
  check_as_argument(argument, tensor);
  check_same_layout(argument, tensor, {place.caller, param_name.c_str(), param_place.index}, param);
}

void check_peer_but_order(const at::Tensor& tensor, const Place& place, const at::Tensor& param,
                          const Place& param_place) {
  const bool can_be_laid_anew = is_floating(tensor) && tensor.layout() == at::kStrided &&
                                !tensor.key_set().has_any(kForeign) &&
                                tensor.device() == param.device() &&
                                tensor.sizes() == param.sizes();
  if (!can_be_laid_anew) check_peer(tensor, place, param, param_place);
}

void check_integers(const at::Tensor& tensor, const Place& place, const at::Tensor& param,
                    const Place& param_place) {
  const std::string name = list_name(place);
  const std::string param_name = list_name(param_place);
  const Argument argument = {place.caller, name.c_str(), place.index};
  check_numbers_in_memory(argument, tensor);
  check_device(argument, tensor, param.device());
  check_dense(argument, tensor);
  TORCH_CHECK(tensor.sizes() == param.sizes(), argument, " has sizes ", tensor.sizes(), ", ",
              param_name, '[', param_place.index, "] has ", param.sizes(), "; they must match");
}

void check_exponents(const at::Tensor& tensor, const Place& place, const at::Tensor& param) {
  const std::string name = list_name(place);
  const Argument argument = {place.caller, name.c_str(), place.index};
  const int64_t blocks = math::count_code_blocks(param.numel());
  check_numbers_in_memory(argument, tensor);
  check_device(argument, tensor, param.device());
  check_dense(argument, tensor);
  apex_mp::check_dtype(argument, tensor, {at::kByte});
  TORCH_CHECK_VALUE(tensor.numel() == blocks, argument, " has ", tensor.numel(),
                    " exponents; it must have ", blocks, ", one for each ", math::kCodeBlock,
                    " numbers");
}

void check_dtype(const at::Tensor& tensor, const Place& place, at::ScalarType dtype) {
  if (tensor.scalar_type() == dtype) return;
  const std::string name = list_name(place);
  apex_mp::check_dtype({place.caller, name.c_str(), place.index}, tensor, {dtype});
}

void check_number_of_state(const at::Tensor& tensor, const Place& place, const at::Device& device) {
  if (tensor.scalar_type() == at::kFloat && tensor.numel() == 1 && tensor.device() == device &&
      is_plain(tensor)) {
    return;
  }
  const std::string name = list_name(place);
  const Argument argument = {place.caller, name.c_str(), place.index};
  check_numbers_in_memory(argument, tensor);
  check_one_element(argument, tensor, device, {at::kFloat});
}

}  // namespace apex_mp::step

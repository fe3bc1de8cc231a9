"""Whether a tensor is plain, and a sentence for each reason why not; tensors in containers.

Constructors and `add_param_group` check parameters so, steps and `scale_loss` check gradients,
before they change anything. A reason is the second half of a sentence, whose first half names the
tensor.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from apex_mp import _C

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

Groups: TypeAlias = Sequence[dict[str, Any]]
# A list for each parameter group, with one item for each parameter.
Lists: TypeAlias = list[list[Tensor | None]]

# Says why a tensor does not fit, or None if it does.
Test: TypeAlias = Callable[[Tensor], str | None]

PLAIN_TYPES: set[type] = {Tensor, Parameter}  # A module that subclasses them adds its own.
_STRIDED = torch.strided
_PARAMS = operator.itemgetter("params")


def params_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [*itertools.chain.from_iterable(map(_PARAMS, optimizer.param_groups))]


def place_name(group: Mapping[str, Any], number: int, index: int) -> str:
    """Return what messages call a parameter of a group that is in no model."""
    names = group.get("param_names")
    return names[index] if names else f"group {number}, parameter {index}"


def is_usual(tensor: Tensor) -> bool:
    """Return whether a tensor is plain, floating and contiguous: a fast path, not a requirement."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is _STRIDED
        and tensor.dtype in FLOATING
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_meta)
    )


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, FakeTensor or other subclass with `__torch_dispatch__`."""
    if type(tensor) in PLAIN_TYPES:
        return False
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a DTensor; another tensor as it is."""
    if type(tensor) in PLAIN_TYPES or not is_wrapper(tensor):
        return tensor
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def has_kernels(device: torch.device) -> bool:
    """Return whether the operators of this build run on a device."""
    return device.type == "cpu" or (device.type == "cuda" and _C.with_cuda)


def copy_async(values: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`; asynchronously, unless it is the CPU, which would read it too early."""
    return values.to(device, non_blocking=device.type != "cpu")


def whole(tensor: Tensor) -> Tensor:
    """Return a DTensor as one plain tensor, by a collective; another tensor as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie in memory without gaps or overlap, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def writable(tensor: Tensor) -> Tensor:
    """Return a strided tensor, or a copy if it is conjugated, negated or not dense in memory."""
    if is_usual(tensor) or is_wrapper(tensor):
        return tensor
    if not (tensor.is_neg() or tensor.is_conj()) and is_dense(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def no_numbers(tensor: Tensor) -> str | None:
    """Return why a tensor's memory does not hold its numbers, one for each element, or None."""
    if is_lazy(tensor):
        return "is not initialized; run the model once before"
    if local_part(tensor) is not tensor:
        return (
            f"is a {type(tensor).__name__}, of which each process holds a part. "
            "apex_mp.amp.GradScaler with FusedAdam(..., master_weights=True) trains these "
            "(docs/parallel.md#sharded-parameters); DTensor.to_local() returns a plain tensor"
        )
    if is_wrapper(tensor):
        return (
            f"is a {type(tensor).__name__}, whose numbers do not lie in its memory; it must be a "
            "plain tensor"
        )
    sparse = not_strided(tensor)
    if sparse is not None:
        return sparse
    if tensor.is_meta:
        return "is on meta, where there are no numbers; it must be on the CPU or on a CUDA device"
    if tensor.is_neg():
        return "is a negative view, whose numbers do not lie in its memory; call resolve_neg()"
    return None


def not_strided(tensor: Tensor) -> str | None:
    """Return that a tensor is sparse, if it is."""
    if tensor.layout is torch.strided:
        return None
    return (
        f"is sparse ({tensor.layout}); it must be dense (layers with sparse=False have dense "
        "gradients)"
    )


def not_floating(tensor: Tensor) -> str | None:
    """Return that a tensor's dtype is not one that the operators compute in, if so."""
    if tensor.dtype in FLOATING:
        return None
    return f"is of dtype {tensor.dtype}; it must be float16, bfloat16, float32 or float64"


def not_dense(tensor: Tensor) -> str | None:
    """Return why the operators cannot walk the memory of a tensor, or None."""
    if is_dense(tensor):
        return None
    return (
        f"has sizes {[*tensor.shape]} and strides {[*tensor.stride()]}; its elements must lie in "
        "memory without gaps or overlap, make it contiguous()"
    )


def not_readable(tensor: Tensor) -> str | None:
    """Return why the operators cannot read a tensor, or None."""
    return None if is_usual(tensor) else no_numbers(tensor) or not_floating(tensor)


def not_castable(tensor: Tensor) -> str | None:
    """Return why a parameter cannot be cast to low precision, or None; integers are not cast."""
    if not tensor.dtype.is_floating_point:
        return None
    reason = no_numbers(tensor)
    if reason is None and tensor.requires_grad and tensor.is_inference():
        reason = "was made in torch.inference_mode, so it cannot be trained; make it outside"
    return reason


def not_steppable(tensor: Tensor) -> str | None:
    """Return why an operator cannot step a parameter, or None; lazy ones are not judged yet."""
    if is_usual(tensor) or is_lazy(tensor):
        return None
    return not_readable(tensor) or not_dense(tensor)


def part_not_steppable(tensor: Tensor) -> str | None:
    """Return why an operator cannot step what this process holds of a parameter, or None."""
    return not_steppable(local_part(tensor))


def check_params(
    caller: str, number: int, params: Iterable[Any], test: Test, names: Sequence[str] | None = None
) -> None:
    """Refuse the parameters of a group that do not fit; those without requires_grad are skipped."""
    for index, param in enumerate(params):
        if not (isinstance(param, Tensor) and param.requires_grad):
            continue
        reason = test(param)
        if reason is not None:
            name = f" ({names[index]})" if names and names[index] else ""
            raise TypeError(f"{caller}: params[{number}][{index}]{name} {reason}")


def listed(param_group: Any) -> tuple[list[Any], list[str] | None]:
    """Return the parameters of a group that is about to be added, and their names.

    An iterator, which can be read once, becomes a list in the group. What torch refuses is left to
    it.
    """
    given = param_group.get("params") if isinstance(param_group, dict) else None
    if given is None or isinstance(given, set):
        return [], None
    if isinstance(given, Tensor):
        return [given], None
    items = param_group["params"] = list(given)
    pairs = [item if isinstance(item, tuple) and len(item) == 2 else ("", item) for item in items]
    return [param for _, param in pairs], [f"{name}" for name, _ in pairs]


def map_tensors(cast: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with every tensor in it replaced; unchanged containers stay themselves."""
    if isinstance(value, Tensor):
        return cast(value)
    return map_items(functools.partial(map_tensors, cast), value)


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a container with its items replaced; an unchanged one, or no container, as it is.

    Containers are lists, tuples, deques and mappings, also of the user's own classes.
    """
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (list, tuple, collections.deque)):
        items = [function(item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if hasattr(value, "_make"):  # A namedtuple, PackedSequence for one.
            return value._make(items)
        if isinstance(value, collections.deque):
            return type(value)(items, value.maxlen)
        return type(value)(items)
    if isinstance(value, Mapping):
        values = {key: function(item) for key, item in value.items()}
        if all(map(operator.is_, values.values(), value.values())):
            return value
        if not isinstance(value, MutableMapping):
            return values
        new: Any
        new = value.copy() if isinstance(value, dict) else copy.copy(value)
        for key, item in values.items():  # Some subclasses refuse update().
            new[key] = item
        return new
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with every floating tensor in it cast to a dtype; others stay as they are."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def match_strides(grad: Tensor, param: Tensor) -> Tensor:
    """Return the gradient with its elements in memory in the parameter's order, not negated.

    One that is not plain, or of another shape, is returned as it is; callers refuse it.
    """
    if grad.layout is not torch.strided:
        return grad
    alike = (grad.is_contiguous() and param.is_contiguous()) or grad.stride() == param.stride()
    if (alike and not grad.is_neg()) or grad.shape != param.shape or is_wrapper(grad):
        return grad
    return torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad)

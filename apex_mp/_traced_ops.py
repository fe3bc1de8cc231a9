"""Trace the operators: write to no tensor whose offset torch.compile counts twice.

torch replaces an operator that writes into its arguments by one that returns new tensors, and makes
the arguments anew from the tensors of which they are views. Where such a tensor does not start
at the start of its memory, the offset is counted twice: for slices, and in copies that inductor
makes of inputs that share a memory (torch 2.11; 2.13 with dynamic shapes). Other memory is then
read and written, without an error. So a traced operator works on a copy, whose content is then
copied back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._higher_order_ops.auto_functionalize import get_base
from torch._ops import OpOverload
from torch._prims_common import compute_required_storage_length
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _pytree as pytree


def copy_offset_arguments(operator: OpOverload) -> None:
    """Let `operator`, where it is traced, write to copies of tensors that lie at an offset."""
    arguments = operator._schema.arguments

    @operator.py_impl(FunctionalTensorMode)
    def trace(mode: FunctionalTensorMode, *args: Any, **kwargs: Any) -> None:
        names = [argument.name for argument in arguments]
        call = dict(zip(names, args, strict=False)) | kwargs
        written = [call.get(argument.name) for argument in arguments if argument.is_write]
        with mode:
            targets = [tensor for tensor in pytree.tree_leaves(written) if _is_at_offset(tensor)]
            copies = {id(target): _copy(target) for target in targets}
        call = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), call)
        mode.__torch_dispatch__(operator, (), (), call)
        with mode:
            for target in targets:
                target.copy_(copies[id(target)])


def _is_at_offset(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    base = get_base(tensor)  # type: ignore[no-untyped-call]
    return (tensor if base is None else base).storage_offset() != 0


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with equal strides, in a memory that is larger than needed.

    Of a plain clone inductor assumes that it is the tensor itself, offset included.
    """
    room = compute_required_storage_length(tensor.size(), tensor.stride(), 0)
    return tensor.new_empty(room + 1).as_strided(tensor.size(), tensor.stride()).copy_(tensor)

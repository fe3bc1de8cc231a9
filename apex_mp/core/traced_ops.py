"""Make traced operators write to copies: torch.compile may count a tensor's offset twice.

torch replaces an operator that writes into its arguments by one that returns new tensors, and makes
the arguments anew from the tensors of which they are views. Where such a tensor does not start
at the start of its memory, the offset is counted twice: for slices, and in copies that inductor
makes of inputs that share a memory (torch 2.11; 2.13 with dynamic shapes). Other memory is then
read and written, without an error. A clone may be such a tensor: inductor replaces it by what was
cloned. So a traced operator works on copies, whose content is then copied back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import compute_required_storage_length
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _pytree as pytree


def copy_written_arguments(operator: OpOverload) -> None:
    """Make `operator` write to copies when it is traced."""
    arguments = operator._schema.arguments

    @operator.py_impl(FunctionalTensorMode)
    def trace(mode: FunctionalTensorMode, *args: Any, **kwargs: Any) -> None:
        names = [argument.name for argument in arguments]
        call = dict(zip(names, args, strict=False)) | kwargs
        written = [call.get(argument.name) for argument in arguments if argument.is_write]
        with mode:
            targets = [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]
            copies = {id(target): _copy(target) for target in targets}
        call = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), call)
        mode.__torch_dispatch__(operator, (), (), call)
        with mode:
            for target in targets:
                target.copy_(copies[id(target)])


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with equal strides, in a memory that is larger than needed.

    Inductor would replace a plain clone by the tensor itself, offset included.
    """
    length = compute_required_storage_length(tensor.size(), tensor.stride(), 0)
    return tensor.new_empty(length + 1).as_strided(tensor.size(), tensor.stride()).copy_(tensor)

"""Parameters and gradients that are no plain dense tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map


class Wrapper(Tensor):
    """A tensor whose numbers lie in another, as those of quantized or sharded tensors do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(one: Any) -> Any:
            return one.inner if isinstance(one, Wrapper) else one

        result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda one: Wrapper(one) if isinstance(one, Tensor) else one, result)


def fake(tensor: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def sharded(tensor: Tensor) -> Tensor:
    """Needs a process group."""
    return distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Shard(0)])


# Each makes its kind of tensor from plain numbers.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda tensor: tensor,
    "DTensor": sharded,
    "FakeTensor": fake,
    "subclass": Wrapper,
    "negative view": lambda tensor: torch._neg_view(-tensor),
    "gaps": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "expanded": lambda tensor: tensor[:1, :1].expand_as(tensor),
    "sparse": lambda tensor: tensor.to_sparse(),
    "complex": lambda tensor: torch.complex(tensor.float(), -tensor.float()),
    "conjugate": lambda tensor: torch.complex(tensor.float(), -tensor.float()).conj(),
    "meta": lambda tensor: tensor.to("meta"),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "integer": lambda tensor: tensor.int(),
}


def numbers_of(tensor: Tensor) -> Tensor:
    """Return the numbers of such a tensor, if it has any, as a plain one."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if isinstance(tensor, Wrapper):
        tensor = tensor.inner
    return tensor.to_dense().resolve_conj().resolve_neg().clone()

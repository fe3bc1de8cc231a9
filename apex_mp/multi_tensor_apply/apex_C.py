"""The compiled module apex_C of apex: many tensors in one vector, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "flatten",
    "unflatten",
]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors, which are of one dtype, in one new vector.

    Args:
        tensors: Any shapes, one dtype.

    Raises:
        RuntimeError: There is no tensor, or their dtypes differ.
        TypeError: It is no list of tensors.
    """
    _check_is_list("flatten", tensors)
    if not tensors:
        raise RuntimeError("apex_C.flatten: tensors is empty; it must hold a tensor at least")
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise RuntimeError(
            f"apex_C.flatten: tensors are of {', '.join(sorted(map(str, dtypes)))}; "
            "they must be of one dtype"
        )
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a vector with the sizes of `tensors`, in their order.

    Args:
        flat: A vector with at least as many elements as `tensors` have together.
        tensors: Tensors with the shapes of the views.

    Raises:
        RuntimeError: `flat` is no vector, or has fewer elements than `tensors`.
        TypeError: `flat` is no tensor, or `tensors` no list of tensors.
    """
    _check_is_list("unflatten", tensors)
    if not isinstance(flat, Tensor):
        raise TypeError(
            f"apex_C.unflatten: flat is a {type(flat).__name__}; it must be a tensor, and the "
            "second argument the list"
        )
    if flat.dim() != 1:
        raise RuntimeError(
            f"apex_C.unflatten: flat has {flat.dim()} dimensions; it must be a vector"
        )
    needed = sum(tensor.numel() for tensor in tensors)
    if flat.numel() < needed:
        raise RuntimeError(
            f"apex_C.unflatten: flat has {flat.numel()} elements; tensors have {needed} together"
        )
    pieces = torch.split(flat[:needed], [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _check_is_list(function: str, tensors: Any) -> None:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(
            f"apex_C.{function}: tensors is a {type(tensors).__name__}; it must be a list of them"
        )
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"apex_C.{function}: tensors[{index}] is a {type(tensor).__name__}; it must be a "
                "tensor"
            )

"""Collectives over many tensors, as one vector of each type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

Call = Callable[..., Any]


def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Call, extra_args: Sequence[Any] | None = None
) -> None:
    """Call a collective on all tensors of a bucket as one vector; write its result back to them.

    Args:
        bucket: Tensors of one dtype and device.
        call: A function of torch.distributed that writes its argument, such as `broadcast`. The
            result of `all_reduce` is divided by the number of processes.
        extra_args: Further arguments for `call`, by position [None].
    """
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    with torch.no_grad():
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def flat_dist_call(
    tensors: Iterable[Tensor], call: Call, extra_args: Sequence[Any] | None = None
) -> None:
    """Call `apply_flat_dist_call` with the tensors of each type.

    Args:
        tensors: Of any dtypes and shapes; written.
        call: See there.
        extra_args: See there [None].
    """
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Return tensors by what their `type()` says, in their order."""
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.type(), []).append(tensor)
    return found


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the float16, the float32 and the float64 tensors; without the lists that are empty."""
    given = [*tensors]
    of_dtype = (
        [tensor for tensor in given if tensor.dtype == dtype]
        for dtype in (torch.float16, torch.float32, torch.float64)
    )
    return [bucket for bucket in of_dtype if bucket]


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append the tensors of a nested structure to a list.

    Args:
        maybe_tensor: A tensor; an iterable of such structures; a dict, whose values are searched;
            or anything else, which is ignored.
        tensor_list: Appended to.
    """
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
    elif isinstance(maybe_tensor, dict):
        extract_tensors([*maybe_tensor.values()], tensor_list)
    elif isinstance(maybe_tensor, Iterable) and not isinstance(maybe_tensor, (str, bytes)):
        for item in maybe_tensor:
            extract_tensors(item, tensor_list)

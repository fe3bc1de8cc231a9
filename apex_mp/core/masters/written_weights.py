"""Compares 16-bit weights with their float32 masters, to find what others wrote."""

from __future__ import annotations

import torch
from torch import Tensor

from apex_mp.core import tensors
from apex_mp.core.grads.checks import match_strides
from apex_mp.core.masters.masters import LOW_PRECISION


def is_time_to_compare(steps: int) -> bool:
    """Return whether a step compares all weights with their masters, after a number of steps.

    A write through `.data` changes neither version nor address, by which writes are known. So all
    are compared in the first steps and in ever rarer ones; and in each, once one was found so.
    """
    return steps & (steps - 1) == 0


@torch.no_grad()
def differ(master: Tensor, weight: Tensor, *, converted: bool = False) -> Tensor:
    """Return where a weight is not its float32 master, rounded to 16 bits: it was written.

    Args:
        master: The master, float32; of a DTensor the part here is compared.
        weight: Its float16 or bfloat16 weight.
        converted: Whether weights agree, too, if all were rounded to the other 16-bit dtype before:
            those of a bfloat16 checkpoint in a float16 model [False].

    Returns:
        A bool tensor in the shape of the weight.
    """
    master, weight = tensors.local_part(master), tensors.local_part(weight)
    differs = _is_not_rounded(weight, master, weight.dtype)
    if not converted:
        return differs
    (other,) = {*LOW_PRECISION} - {weight.dtype}
    differs_from_other = _is_not_rounded(weight, master, other)
    return torch.where(differs_from_other.any(), differs, differs_from_other)


def _is_not_rounded(weight: Tensor, master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where weights are not masters that were rounded to a dtype.

    Conversion rounds a tie to even, csrc/math/split.h a bfloat16 and a small float16 to the larger.
    """
    nearest = master.to(dtype)
    if dtype == torch.bfloat16:
        larger = (master.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(dtype)
    else:
        size = master.abs()
        steps = (size * 2.0**24 + 0.5).floor() * 2.0**-24
        larger = torch.where(size < 2.0**-16, steps.copysign(master).to(dtype), nearest)
    nearest, larger = nearest.to(weight.dtype), larger.to(weight.dtype)
    return (weight != nearest) & (weight != larger) & ~(weight.isnan() & nearest.isnan())


@torch.no_grad()
def current(master: Tensor, weight: Tensor) -> Tensor:
    """Return a master with the weights where these were written; the host waits for a GPU.

    Args:
        master: The float32 master; maybe in another memory order.
        weight: The float16 or bfloat16 weight.

    Returns:
        The master itself if nothing was written, else a copy; in the weight's memory order.
    """
    laid = match_strides(master.detach(), weight)
    differs = differ(laid, weight, converted=True)
    if not bool(differs.any()):
        return laid
    copy = laid.clone()
    local, part = tensors.local_part(copy), tensors.local_part(weight.detach())
    local.copy_(torch.where(differs, part, local))
    return copy

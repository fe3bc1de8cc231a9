"""Weights that are not their masters, rounded, because others wrote them."""

from __future__ import annotations

import torch
from torch import Tensor

from apex_mp.core import tensors
from apex_mp.core.grads import match_strides
from apex_mp.core.masters import LOW_PRECISION


@torch.no_grad()
def differ(master: Tensor, weight: Tensor, *, converted: bool = False) -> Tensor:
    """Return where weights are not their float32 masters, rounded: they were written by others.

    Args:
        master: The masters, float32; of a DTensor the part here is compared.
        weight: Their float16 or bfloat16 weights.
        converted: Whether weights agree, too, if all were rounded to the other 16-bit dtype before:
            those of a bfloat16 checkpoint in a float16 model.
    """
    master, weight = tensors.local_part(master), tensors.local_part(weight)
    differs = _are_not(weight, master, weight.dtype)
    if not converted:
        return differs
    (other,) = {*LOW_PRECISION} - {weight.dtype}
    differs_from_other = _are_not(weight, master, other)
    return torch.where(differs_from_other.any(), differs, differs_from_other)


def _are_not(weight: Tensor, master: Tensor, dtype: torch.dtype) -> Tensor:
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
    """Return a master; a copy with the weights where these were written by others.

    Args:
        master: The float32 master; maybe in another memory order.
        weight: The float16 or bfloat16 weight.
    """
    laid = match_strides(master.detach(), weight)
    differs = differ(laid, weight, converted=True)
    if not bool(differs.any()):
        return laid
    copy = laid.clone()
    local, part = tensors.local_part(copy), tensors.local_part(weight.detach())
    local.copy_(torch.where(differs, part, local))
    return copy

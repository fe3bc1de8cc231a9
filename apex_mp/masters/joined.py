"""The float32 master of a 16-bit weight and what is kept beside it.

A master that does not round to its weight is the weight (csrc/math/split.h). So a weight may be
written at any time, in any way: its master follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import tensors
from apex_mp.core.tensors import match_strides


@torch.no_grad()
def joined(weight: Tensor, kept: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the float32 master of a float16 or bfloat16 weight.

    Args:
        weight: The weight; of a DTensor the part here is read.
        kept: The int16 remainder, or the float32 master; maybe in another memory order.
        out: Where the master is written, in the weight's memory order; may be `kept` [None: new].
    """
    if out is None:
        out = like(weight, torch.float32)
    laid = match_strides(kept.detach(), weight)
    if type(weight) in tensors.PLAIN_TYPES:
        _C.join_master(weight.detach(), laid, out)
    else:
        _C.join_master(*map(tensors.local_part, (weight.detach(), laid, out)))
    return out


def split(master: Tensor, weight: Tensor, remainder: Tensor | None = None) -> Tensor:
    """Write one part of a float32 master to its weight; return the other, an int16 remainder.

    Args:
        master: The master.
        weight: Its weight.
        remainder: Where the other part is written, in the weight's memory order [None: new].
    """
    if remainder is None:
        remainder = like(weight, torch.int16)
    _C.split_master(*map(tensors.local_part, (master, weight.detach(), remainder)))
    return remainder


def differ(master: Tensor, weight: Tensor) -> Tensor:
    """Return where a float32 master does not round to its weight, which was written."""
    master, weight = tensors.local_part(master.detach()), tensors.local_part(weight.detach())
    now = joined(weight, master)
    return (now != master) & ~(now.isnan() & master.isnan())


def like(param: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros in the shape and memory order of a parameter."""
    return torch.zeros_like(param, dtype=dtype, device=device, requires_grad=False)

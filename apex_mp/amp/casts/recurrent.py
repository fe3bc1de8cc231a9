"""Recurrent layers and cells in low precision, on the CPU too, where torch has no kernels for it.

torch's CPU kernels refuse fp16 or take fifteen times as long as in float32. There weights and
inputs are rounded to fp16, the layer computes in float32, and its outputs are rounded again. The
matrix units of a GPU do the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp.casts.casting import Caster, Function
from apex_mp.core.tensors import map_tensors


def wrap_recurrent(function: Function, name: str, caster: Caster) -> Function:
    """Return a function of torch._VF that takes and gives low precision on the CPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not caster.is_on():
            return caster.call_where_off(wrapper, function, args, kwargs)
        dtype = torch.get_autocast_dtype(caster.device_type)
        args, kwargs = caster.to_low(name, args, kwargs)
        if dtype is not torch.float16:
            return caster.call_uncast(function, args, kwargs)
        args, kwargs = _to(torch.float32, args, dtype), _to(torch.float32, kwargs, dtype)
        return _to(dtype, caster.call_uncast(function, args, kwargs), torch.float32)

    return wrapper


def _to(target: torch.dtype, value: Any, source: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(target) if tensor.dtype is source and tensor.is_cpu else tensor

    return map_tensors(cast, value)

"""amp.fp16_compute: a module that keeps float32 parameters and computes with casts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex_mp.amp.casting import map_tensors
from apex_mp.fp16_utils.fp16util import hide_prefix


class LowPrecisionCompute(nn.Module):
    """Calls a module with casts of its parameters and inputs; see `fp16_compute`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype
        hide_prefix(self, "module.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; what it returns is in low precision."""
        stay = {
            f"{path}.{name}" if path else name
            for path, module in self.module.named_modules()
            if isinstance(module, _BatchNorm)
            for name, _ in module.named_parameters(recurse=False)
        }
        casts = {
            name: self._cast(param)
            for name, param in self.module.named_parameters()
            if name not in stay
        }
        args, kwargs = map_tensors(self._cast, args), map_tensors(self._cast, kwargs)
        return torch.func.functional_call(self.module, casts, args, kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.dtype is torch.float32 else tensor


def fp16_compute(module: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Module:
    """Return a module with the same float32 parameters, whose forward runs on casts of them.

    It needs neither `amp.init()` nor `initialize`: for a part of a model that is to compute in low
    precision while optimizer and checkpoints see float32. Batch norms keep float32 parameters.

    Args:
        module: A module with float32 parameters; it is used, not copied. Its state_dict keys stay.
        dtype: torch.float16 or torch.bfloat16 [torch.float16].

    Raises:
        ValueError: `dtype` is another one.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"fp16_compute: dtype is {dtype}; it must be torch.float16 or torch.bfloat16"
        )
    return LowPrecisionCompute(module, dtype)

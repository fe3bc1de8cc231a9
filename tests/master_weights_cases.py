"""Parameters in 16 bits, and twins in float32 that get the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import assert_same_bits
from torch import nn

from apex_mp.core.masters.written_weights import differ

F16, BF16 = torch.float16, torch.bfloat16
both_kinds = pytest.mark.parametrize("kind", [True, "split"], ids=["whole", "split"])


def new_params(optimizer_class: Any, dtype: torch.dtype, device: Any) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes: list[Any] = [(10, 5), (4, 4)]
    shapes += [] if optimizer_class is torch.optim.Muon else [(10,), ()]
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes
    ]


def in_float32(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().float()) for param in params]


def give_grads(params: list[nn.Parameter], twins: list[nn.Parameter], step: int) -> None:
    """Give both the same gradients, which 16 bits hold."""
    generator = torch.Generator().manual_seed(step)
    for param, twin in zip(params, twins, strict=True):
        grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        param.grad, twin.grad = grad, grad.float()


def check(optimizer: Any, params: list[nn.Parameter], twins: list[nn.Parameter]) -> None:
    """Masters are the twins to the bit, and parameters are masters, rounded."""
    kept = dict(optimizer._own_masters.saved())
    for param, twin in zip(params, twins, strict=True):
        assert param.dtype in (F16, BF16)
        assert_same_bits(kept[param], twin.detach())
        assert not differ(twin, param).any()

"""Parameters in 16 bits, and twins in float32 that get the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import assert_same_bits
from torch import Tensor, nn
from torch import distributed as dist

from apex_mp.masters.joined import differ
from apex_mp.optimizers import MasterWeights

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


def is_fused(optimizer: Any) -> bool:
    """Return whether the last step was that of a rule, and not torch's own with masters."""
    return optimizer._equivalent is not None and not optimizer._equivalent._was_own


def masters_of(optimizer: Any) -> dict[Tensor, Tensor]:
    """Return the masters that an optimizer keeps, in float32."""
    return {param: optimizer.master(param) for param in optimizer._own_masters.kept}


def check(optimizer: Any, params: list[nn.Parameter], twins: list[nn.Parameter]) -> None:
    """Masters are the twins to the bit, and parameters are masters, rounded."""
    kept = masters_of(optimizer)
    for param, twin in zip(params, twins, strict=True):
        assert param.dtype in (F16, BF16)
        assert_same_bits(kept[param], twin.detach())
        assert not differ(twin, param).any()


def train_in_parallel(rank: int, folder: str) -> None:
    """One of two processes, each with a batch of its own; write the gradients and weights."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False).bfloat16()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = MasterWeights(parallel.parameters(), torch.optim.SGD, lr=0.1)
    grads = []
    for _ in range(3):
        parallel(torch.full((1, 2), float(rank + 1), dtype=BF16)).sum().backward()
        grads.append(model.weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    torch.save((grads, model.weight.detach()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()

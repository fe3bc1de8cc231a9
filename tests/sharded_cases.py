"""Training in two processes with parameters or optimizer state that torch shards."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from apex_mp.amp import GradScaler
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedAdam

WORLD, STEPS, BAD_STEP = 2, 6, 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


def full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, world: int) -> dict[str, Any]:
    """Take STEPS steps, each process with its part of the batch; the last one has an inf in one."""
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    moved, scales, norms = [], [], []
    for step in range(STEPS):
        x = torch.randn(8, 6, generator=generator).chunk(world)[rank].to(dtype)
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        if step == BAD_STEP and rank == world - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [full(param) for param in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved.append(
            any(
                not torch.equal(a, full(b)) for a, b in zip(before, model.parameters(), strict=True)
            )
        )
        scales.append(scaler.get_scale())
        norms.append(full(norm).item())
    params = [full(param) for param in model.parameters()]
    return {"moved": moved, "scales": scales, "norms": norms, "params": params}


def fully_sharded(dtype: torch.dtype, rank: int, world: int, **options: Any) -> dict[str, Any]:
    model: Any = net().to(dtype)
    if world > 1:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)
    return train(model, optimizer, rank, world)


def zero(rank: int, world: int) -> dict[str, Any]:
    model: Any = net()
    if world == 1:
        return train(model, FusedAdam(model.parameters(), lr=1e-2, eps=1e-3), rank, world)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedAdam, lr=1e-2, eps=1e-3)
    return train(model, optimizer, rank, world)


def refusals() -> list[str]:
    """Return what the optimizers that cannot step a DTensor say of one."""
    said = []
    for make in (
        FusedAdam,
        lambda params: FP16_Optimizer(torch.optim.SGD(params, lr=0.1), verbose=False),
    ):
        model: Any = copy.deepcopy(net())
        fully_shard(model)
        try:
            make(model.parameters())
        except (TypeError, ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def work(rank: int, folder: str) -> None:
    """Be one of the processes; leave what was found in a file."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    found = {
        "fp16": fully_sharded(torch.float16, rank, WORLD),
        "fp32 fused": fully_sharded(torch.float32, rank, WORLD, fused=True),
        "zero": zero(rank, WORLD),
        "refused": refusals(),
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()

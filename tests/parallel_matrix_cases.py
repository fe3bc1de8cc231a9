"""Every API with every kind of parallelism that torch has, in four processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import stand_in
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from two_process_cases import (
    Trainer,
    no_reduction,
    torchs,
    with_fp16_optimizer,
    with_initialize,
)

from apex_mp import amp, fp16_utils, optimizers
from apex_mp.amp import GradScaler
from apex_mp.amp.casts import current as _current
from apex_mp.core import tensors
from apex_mp.optimizers import FusedAdam, FusedLAMB, FusedSGD

WORLD, STEPS, BAD_STEP = 4, 5, 2

Build = Callable[[nn.Module, Any, Any], Trainer]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


# --- Kinds of parallelism: of a model, before it has an optimizer.


def hsdp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp2(model: nn.Module) -> None:
    fully_shard(model[0])
    fully_shard(model)


def tensor_parallel_fsdp2(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a model is spread over processes.

    Attributes:
        shard: Shards it; None: it is given to DistributedDataParallel.
        parts: In how many parts a batch is cut.
        is_zero: Whether the optimizer is sharded.
    """

    shard: Callable[[nn.Module], None] | None = None
    parts: int = WORLD
    is_zero: bool = False


ALONE = Kind(no_reduction, 1)
KINDS = {
    "DDP": Kind(),
    "FSDP2": Kind(fsdp2),
    "HSDP": Kind(hsdp),
    "TP + FSDP2": Kind(tensor_parallel_fsdp2, 2),
    "ZeRO": Kind(is_zero=True),
}


# --- The APIs.


@dataclasses.dataclass
class WithScaler(Trainer):
    """A script that has a GradScaler.

    Attributes:
        step: Clips and steps.
    """

    step: Callable[[], None]


def grad_scaler(model: nn.Module, wrap: Any, make: Any) -> Trainer:
    wrapped = wrap(model)
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def step() -> None:
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()

    def backward(loss: Tensor) -> None:
        scaler.scale(loss).backward()

    return WithScaler(wrapped, optimizer, backward, scaler.get_scale, step)


def fp16_optimizer(face: Any, model: nn.Module, wrap: Any, make: Any) -> Trainer:
    return with_fp16_optimizer(face, make)(model, wrap)


def initialize(level: str, model: nn.Module, wrap: Any, make: Any) -> Trainer:
    return with_initialize(level, make)(model, wrap)


ADAM = {"lr": 1e-2, "eps": 1e-3}
SGD = {"lr": 0.05, "momentum": 0.9}
MASTERS = {"master_weights": True}
# The API, the dtype of the model, and an optimizer with its options.
APIS: dict[str, tuple[Build, torch.dtype, Any, dict[str, Any]]] = {
    "GradScaler, `torch.optim.AdamW`": (grad_scaler, torch.float32, torch.optim.AdamW, ADAM),
    "GradScaler, `FusedAdam`": (grad_scaler, torch.float16, FusedAdam, ADAM | MASTERS),
    "GradScaler, `FusedAdam(offload=True)`": (
        grad_scaler,
        torch.float16,
        FusedAdam,
        ADAM | MASTERS | {"offload": True},
    ),
    "GradScaler, `FusedSGD`": (
        grad_scaler,
        torch.float16,
        FusedSGD,
        SGD | MASTERS,
    ),
    "GradScaler, `FusedLAMB`": (grad_scaler, torch.float16, FusedLAMB, ADAM | MASTERS),
    "`fp16_utils.FP16_Optimizer`": (
        functools.partial(fp16_optimizer, fp16_utils.FP16_Optimizer),
        torch.float16,
        torch.optim.SGD,
        SGD,
    ),
    "`optimizers.FP16_Optimizer`": (
        functools.partial(fp16_optimizer, optimizers.FP16_Optimizer),
        torch.float16,
        FusedAdam,
        ADAM,
    ),
    "`amp.initialize`, O1": (functools.partial(initialize, "O1"), torch.float32, FusedAdam, ADAM),
    "`amp.initialize`, O2": (functools.partial(initialize, "O2"), torch.float32, FusedAdam, ADAM),
}


def train(api: str, kind: Kind, rank: int) -> dict[str, Any]:
    """Take STEPS steps; in one of them the last part of the batch has an inf."""
    build, dtype, cls, options = APIS[api]
    model = net().to(dtype)
    wrap = torchs
    if kind.shard is not None:
        kind.shard(model)
        wrap = no_reduction

    def make(params: Any) -> Any:
        params = [*params]
        return (
            ZeroRedundancyOptimizer(params, cls, **options)
            if kind.is_zero
            else cls(params, **options)
        )

    try:
        with pytest.MonkeyPatch.context() as patch:
            if options.get("offload"):
                stand_in(patch, seed=rank)
            trainer = build(model, wrap, make)
            return steps(trainer, model, kind, rank * kind.parts // WORLD)
    except (TypeError, ValueError, RuntimeError) as error:
        return {"refused": str(error)}
    finally:
        if _current.handle is not None:
            _current.handle._deactivate()
        vars(amp._amp_state).update(vars(type(amp._amp_state)()))


def steps(trainer: Trainer, model: nn.Module, kind: Kind, part: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    step = getattr(trainer, "step", trainer.optimizer.step)
    moved, scales, start = [], [], values(model)
    dtype = next(model.parameters()).dtype
    for number in range(STEPS):
        x = torch.randn(8, 6, generator=generator).chunk(kind.parts)[part].to(dtype)
        loss = trainer.model(x).float().square().mean()
        if number == BAD_STEP and part == kind.parts - 1:
            loss = loss * float("inf")
        trainer.backward(loss)
        before = values(model)
        step()
        trainer.optimizer.zero_grad()
        moved.append(not torch.equal(before, values(model)))
        scales.append(trainer.scale())
    return {"moved": moved, "scales": scales, "start": start, "params": values(model)}


def values(model: nn.Module) -> Tensor:
    """Return the elements of all parameters as float32."""
    return torch.cat([tensors.whole(p).detach().flatten().float() for p in model.parameters()])


_DTENSOR = "is a DTensor, of which each process holds a part. apex_mp.amp.GradScaler with FusedAdam"
_LISTS = "ZeroRedundancyOptimizer steps its parameters by its optim"
_SHARDED = ("FSDP2", "HSDP", "TP + FSDP2")
# What the others say instead.
REFUSED: dict[tuple[str, str], str] = {
    **{
        ("GradScaler, `FusedAdam(offload=True)`", kind): (
            "FusedAdam: params[0][0] is a DTensor, and offload is set; it must be False"
        )
        for kind in _SHARDED
    },
    **{
        ("GradScaler, `FusedLAMB`", kind): f"FusedLAMB: params[0][0] {_DTENSOR}"
        for kind in _SHARDED
    },
    **{
        (f"`{module}.FP16_Optimizer`", kind): f"FP16_Optimizer: {sentence}"
        for module in ("fp16_utils", "optimizers")
        for kind, sentence in [
            *((kind, f"params[0][0] {_DTENSOR}") for kind in _SHARDED),
            ("ZeRO", _LISTS),
        ]
    },
    **{
        ("`amp.initialize`, O2", kind): f"amp.initialize: the parameter 0.weight {_DTENSOR}"
        for kind in _SHARDED
    },
    ("`amp.initialize`, O2", "ZeRO"): f"amp.initialize: {_LISTS}",
}


def table() -> str:
    """Return what works together, as in docs/parallel.md."""
    lines = ["| | " + " | ".join(KINDS) + " |", "|---" * (1 + len(KINDS)) + "|"]
    for api in APIS:
        cells = ["refused" if (api, kind) in REFUSED else "yes" for kind in KINDS]
        lines.append(f"| {api} | {' | '.join(cells)} |")
    return "\n".join(lines)


def work(rank: int, folder: str) -> None:
    """Be one of the processes; leave what was found in a file."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    found = {(api, name): train(api, kind, rank) for api in APIS for name, kind in KINDS.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()

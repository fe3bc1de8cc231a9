"""The optimizers that benchmarks.rivals compares, what each holds, and what each can do."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apex_mp.amp import GradScaler
from apex_mp.optimizers import MasterWeights
from benchmarks.memory_probe import by_storage

ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


@dataclasses.dataclass(frozen=True)
class Way:
    """An optimizer: its module, class and options; around it MasterWeights, or nothing."""

    module: str
    kind: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    around: bool = False

    def __call__(self, params: Any, lr: float) -> torch.optim.Optimizer:
        kind = getattr(importlib.import_module(self.module), self.kind)
        options = {"lr": lr, **ADAM, **self.options}
        if self.around:
            return MasterWeights(params, kind, master_weights="split", **options)  # type: ignore
        return kind(params, **options)  # type: ignore[no-any-return]


OURS = "apex_mp.optimizers"
NARROW = {"moment_dtype": torch.bfloat16, "stochastic_rounding": True}
BASE = "torch AdamW, float32 weights"
# The first is the one that others are compared with.
WAYS: dict[str, Way] = {
    BASE: Way("torch.optim", "AdamW", dtype=torch.float32),
    "torch AdamW": Way("torch.optim", "AdamW"),
    "apex_mp, split masters": Way(OURS, "FusedAdamW", {"master_weights": "split"}),
    "apex_mp, split, bf16 moments, stochastic": Way(
        OURS, "FusedAdamW", {"master_weights": "split", **NARROW}
    ),
    "apex_mp, split, one-byte moments": Way(
        OURS, "FusedAdamW", {"master_weights": "split", "moment_dtype": torch.int8}
    ),
    "torchao AdamW8bit": Way("torchao.optim", "AdamW8bit"),
    "torchao AdamW8bit, stochastic": Way(
        "torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True}
    ),
    "apex_mp MasterWeights, split, of torchao AdamW8bit": Way(
        "torchao.optim", "AdamW8bit", around=True
    ),
    "torchao CPUOffloadOptimizer": Way("torchao.optim", "CPUOffloadOptimizer"),
    "bitsandbytes AdamW8bit": Way("bitsandbytes.optim", "AdamW8bit"),
    "optimi AdamW, Kahan": Way("optimi", "AdamW"),
    "FlashOptim FlashAdamW": Way("flashoptim", "FlashAdamW"),
}


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all plain tensors within a value, those of a subclass too."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)


def stepped(way: Way, dtype: torch.dtype, width: int, steps: int = 1) -> tuple[Any, Any]:
    """Return the parameters after some steps with random gradients, and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(dtype)
    params = [*model.parameters()]
    optimizer = way(params, 1e-3)
    for _ in range(steps):
        give_grads(params)
        optimizer.step()
    return params, optimizer


def give_grads(params: Sequence[Tensor], size: float = 1e-2) -> None:
    for param in params:
        param.grad = torch.randn(param.shape).mul_(size).to(param.dtype)


def bytes_held(way: Way, width: int) -> dict[str, Any]:
    """Return the bytes a parameter of weights, gradients, and all else that the optimizer keeps."""
    params, optimizer = stepped(way, way.dtype, width)
    store = getattr(optimizer, "_own_masters", None)
    kept = [] if store is None else [*store.kept.values()]
    state = [*tensors(dict(optimizer.state)), *kept]
    held = by_storage({"weights": params, "gradients": [p.grad for p in params], "state": state})
    count = sum(param.numel() for param in params)
    return {"params": count, **{name: round(size / count, 4) for name, size in held.items()}}


def scaled(way: Way, scaler_kind: Callable[..., Any], width: int) -> str:
    """Return "yes" if float16 weights take a step, unscaled and clipped, else what became of it."""
    scale = 2.0**10
    try:
        params, optimizer = stepped(way, torch.float16, width, steps=0)
        before = [param.detach().clone() for param in params]
        scaler = scaler_kind("cpu", init_scale=scale)
        scaler.scale(torch.zeros(()))
        give_grads(params, 1e-4 * scale)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        if not all(param.isfinite().all() for param in params):
            return "weights become inf or NaN"
        changed = any(not torch.equal(*pair) for pair in zip(params, before, strict=True))
        return "yes" if changed else "no weight changes"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def resumed(source: Way, target: Way, width: int) -> str:
    """Return "yes" if the target goes on from the source's state_dict as the source does."""
    try:
        (params, first), (copies, second) = (
            stepped(way, torch.bfloat16, width, steps) for way, steps in ((source, 5), (target, 1))
        )
        # Through a file: a load may keep the tensors that it is given, and both would step them.
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=False))
        changes = []
        for mine, optimizer in ((params, first), (copies, second)):
            for param in mine:
                param.data.zero_()
                param.grad = torch.full_like(param, 1e-3)
            optimizer.step()
            changes.append(torch.cat([param.detach().float().flatten() for param in mine]))
        apart = float((changes[0] - changes[1]).norm() / changes[0].norm())
        return "yes" if apart < 0.1 else f"goes on otherwise: the next step is {apart:.2f} off"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def facts(way: Way, width: int) -> dict[str, Any]:
    kind = getattr(importlib.import_module(way.module), way.kind)
    plain = WAYS["torch AdamW"]
    return {
        "bytes": bytes_held(way, width),
        "torch_GradScaler": scaled(way, torch.amp.GradScaler, width),
        "apex_mp_GradScaler": scaled(way, GradScaler, width),
        "from_torch": resumed(plain, way, width),
        "into_torch": resumed(way, plain, width),
        "clips_in_its_step": "max_grad_norm" in inspect.signature(kind).parameters,
    }

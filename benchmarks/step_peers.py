"""Optimizers of other packages as cases, for where those are installed; none is needed.

Each takes fp32 parameters and does what FusedAdam does to them.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from benchmarks.step_arena import OPTIONS, Arena, Case, Running, give_grads, parameters
from benchmarks.step_cases import ADAM, FP32

Facts = Mapping[str, Callable[[Tensor], object]]


@dataclasses.dataclass(frozen=True)
class Peer:
    """An optimizer of another package.

    Attributes:
        name: For the table.
        package: What pip calls it.
        module: Where the optimizer is.
        kind: Its name there.
        options: Of its constructor, besides those that all have.
        moments: What its state calls them; None lets it make its own.
        more: What its state holds besides.
        devices: Where it runs.
    """

    name: str
    package: str
    module: str
    kind: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moments: tuple[str, str] | None = None
    more: Facts = dataclasses.field(default_factory=dict)
    devices: tuple[str, ...] = ("cuda",)

    def build(self, arena: Arena) -> Running:
        """Make it on the arena's weights."""
        kind = getattr(importlib.import_module(self.module), self.kind)
        params = parameters(arena.weights)
        optimizer = kind(params, **OPTIONS, **self.options)
        if self.moments is not None:
            arena.share_moments(optimizer, self.moments, **self.more)

        def prepare() -> None:
            arena.fill_grads(1.0)
            give_grads(params, arena.grads)

        return Running(prepare, optimizer.step)

    def case(self) -> Case:
        """Return it as a row of the table."""
        return Case(self.name, FP32, (ADAM,), self.build, self.devices, self.package)


def _no_step(param: Tensor) -> int:
    return 0


def _no_compensation(param: Tensor) -> Tensor | None:
    # optimi's Triton kernel wants a tensor where its foreach code wants None.
    return param.new_zeros(1).byte() if param.is_cuda else None


BOTH = ("cpu", "cuda")
MOMENTS = ("exp_avg", "exp_avg_sq")
PEERS = (
    Peer("DeepSpeed CPUAdam", "deepspeed", "deepspeed.ops.adam", "DeepSpeedCPUAdam",
         {"adamw_mode": True}, MOMENTS, {"step": _no_step}, ("cpu",)),
    Peer("DeepSpeed FusedAdam", "deepspeed", "deepspeed.ops.adam", "FusedAdam",
         {"adam_w_mode": True}),
    Peer("bitsandbytes AdamW, 32 bit", "bitsandbytes", "bitsandbytes.optim", "AdamW",
         {"optim_bits": 32}, ("state1", "state2"), {"step": _no_step}, BOTH),
    Peer("optimi AdamW", "torch-optimi", "optimi", "AdamW",
         {}, MOMENTS, {"kahan_comp": _no_compensation}, BOTH),
    # Compiled by Inductor for the tensors of each step.
    Peer("torchao AdamW", "torchao", "torchao.optim", "_AdamW"),
    Peer("apex FusedAdam", "apex", "apex.optimizers", "FusedAdam", {"adam_w_mode": True}),
    Peer("TransformerEngine FusedAdam", "transformer-engine",
         "transformer_engine.pytorch.optimizers", "FusedAdam", {"adam_w_mode": True}),
)  # fmt: skip
CASES = tuple(peer.case() for peer in PEERS)


def versions(device: str) -> dict[str, str | None]:
    """Return the version of each package whose cases run on the device; None: not installed."""
    return {peer.package: version(peer.package) for peer in PEERS if device in peer.devices}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

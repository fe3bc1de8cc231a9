"""Runs of twenty steps in two halves, the second in a process of its own: see test_resume.py.

As a program it runs the second half of every case: `python resume_cases.py FOLDER`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex_mp import amp, fp16_utils, optimizers
from apex_mp.amp import _amp_state
from apex_mp.amp.casts import current as _current
from apex_mp.optimizers import FusedAdam, FusedSGD

STEPS = 10
OVERFLOW_AT = 3  # Only with a dynamic scale.
GROWTH_INTERVAL = 4

INNERS: dict[str, Callable[..., Any]] = {
    "FusedAdam": functools.partial(FusedAdam, lr=0.01, weight_decay=0.1, max_grad_norm=1.0),
    "FusedSGD": functools.partial(
        FusedSGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.1, max_grad_norm=1.0
    ),
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, eps=1e-4),
}


class Net(nn.Module):
    """Two layers with a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def losses_of(model: nn.Module, step: int, *, dynamic: bool) -> tuple[Tensor, Tensor]:
    """Return two losses on the data of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(6, 4, generator=generator)
    outputs = model(inputs).float()
    overflow = float("inf") if dynamic and step == OVERFLOW_AT else 1.0
    kinds = torch.arange(6) % 3
    return nn.functional.cross_entropy(outputs, kinds) * overflow, outputs.square().mean()


class Run:
    """A model and an optimizer that can step, and be saved and loaded as scripts do.

    Args:
        inner: Makes the optimizer of parameters.
        dynamic: Whether the loss scale is; 128 otherwise.
    """

    def __init__(self, inner: Callable[..., Any], *, dynamic: bool) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net()
        self.dynamic = dynamic
        self.prepare(inner)

    def prepare(self, inner: Callable[..., Any]) -> None:
        raise NotImplementedError

    def backward(self, loss: Tensor, penalty: Tensor) -> None:
        raise NotImplementedError

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(*losses_of(self.model, number, dynamic=self.dynamic))
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def scales(self) -> list[float]:
        return [self.optimizer.loss_scale]

    def result(self) -> list[Tensor]:
        """Copies of all numbers that training depends on."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                values = [state[key] for key in sorted(state) if state[key] is not None]
                tensors += [param, *map(torch.as_tensor, values)]
        tensors.append(torch.tensor(self.scales(), dtype=torch.float64))
        return [tensor.detach().clone() for tensor in tensors]


class Alone(Run):
    """A fused optimizer without a wrapper: its own `scale=`, or GradScaler."""

    def prepare(self, inner: Callable[..., Any]) -> None:
        self.optimizer = inner(self.model.parameters())
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**8, growth_interval=GROWTH_INTERVAL, enabled=self.dynamic
        )

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss = sum(losses_of(self.model, number, dynamic=self.dynamic))
        if self.dynamic:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            (loss * 128.0).backward()
            self.optimizer.step(scale=128.0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.scaler.load_state_dict(state["scaler"])

    def scales(self) -> list[float]:
        return [self.scaler.get_scale()]


class Half(Run):
    """An fp16 model with an FP16_Optimizer."""

    face: type[fp16_utils.FP16_Optimizer] = fp16_utils.FP16_Optimizer

    def prepare(self, inner: Callable[..., Any]) -> None:
        self.model = fp16_utils.network_to_half(self.model)
        args = {"init_scale": 2.0**8, "scale_window": GROWTH_INTERVAL}
        self.optimizer = self.face(
            inner(self.model.parameters()), 128.0, self.dynamic, args, verbose=False
        )

    def backward(self, loss: Tensor, penalty: Tensor) -> None:
        self.optimizer.backward(loss + penalty)


class FusedHalf(Half):
    face = optimizers.FP16_Optimizer


class Wrapped(Run):
    """amp.init() and an OptimWrapper with two losses."""

    def prepare(self, inner: Callable[..., Any]) -> None:
        handle: Any = amp.init(loss_scale="dynamic" if self.dynamic else 128.0, device_type="cpu")
        self.optimizer: Any = handle.wrap_optimizer(inner(self.model.parameters()), num_loss=2)
        grow_soon(self.optimizer._loss_scaler)

    def backward(self, loss: Tensor, penalty: Tensor) -> None:
        with self.optimizer.scale_loss(loss) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with self.optimizer.scale_loss(penalty) as scaled_loss:
            scaled_loss.backward()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        grow_soon(self.optimizer._loss_scaler)

    def scales(self) -> list[float]:
        return [scaler.loss_scale() for scaler in self.optimizer._loss_scaler]


class O1(Run):
    """amp.initialize."""

    level = "O1"

    def prepare(self, inner: Callable[..., Any]) -> None:
        self.optimizer = inner(self.model.parameters())
        self.model, self.optimizer = amp.initialize(
            self.model,
            self.optimizer,
            opt_level=self.level,
            loss_scale="dynamic" if self.dynamic else 128.0,
            verbosity=0,
        )
        grow_soon(_amp_state.loss_scalers)

    def backward(self, loss: Tensor, penalty: Tensor) -> None:
        with amp.scale_loss(loss + penalty, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "amp": amp.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        amp.load_state_dict(state["amp"])

    def scales(self) -> list[float]:
        return [scaler.loss_scale() for scaler in _amp_state.loss_scalers]


class O2(O1):
    level = "O2"


def grow_soon(scalers: list[Any]) -> None:
    """Let scales grow within a few steps; amp's checkpoints do not hold after how many."""
    for scaler in scalers:
        if scaler.dynamic:
            scaler.value = dataclasses.replace(scaler.value, growth_interval=GROWTH_INTERVAL)


def _all_cases() -> dict[str, Callable[[], Run]]:
    kinds: dict[str, tuple[type[Run], list[str]]] = {
        "alone": (Alone, ["FusedAdam", "FusedSGD"]),
        "fp16_utils": (Half, [*INNERS]),
        "optimizers": (FusedHalf, [*INNERS]),
        "OptimWrapper": (Wrapped, [*INNERS]),
        "O1": (O1, [*INNERS]),
        "O2": (O2, [*INNERS]),
    }
    return {
        f"{kind} {inner} {'dynamic' if dynamic else 'static'}": functools.partial(
            run, INNERS[inner], dynamic=dynamic
        )
        for kind, (run, inners) in kinds.items()
        for inner in inners
        for dynamic in (False, True)
    }


CASES = _all_cases()


def casts_off() -> None:
    """End what a case of amp has begun in this process."""
    if _current.handle is not None:
        _current.handle._deactivate()
    vars(_amp_state).update(vars(type(_amp_state)()))


def file_of(folder: Path, name: str, part: str) -> Path:
    return folder / f"{name} {part}.pt"


def first_half(name: str, folder: Path) -> tuple[list[float], list[Tensor]]:
    """Run a case, save it half-way, and go on; return scales and numbers at the end."""
    run, scales = CASES[name](), []
    for number in range(2 * STEPS):
        if number == STEPS:
            torch.save(run.state_dict(), file_of(folder, name, "first"))
        run.step(number)
        scales += run.scales()[:1]
    result = run.result()
    casts_off()
    return scales, result


def second_half(name: str, folder: Path) -> None:
    """Load a case, run the rest of it, and save the numbers at the end."""
    run = CASES[name]()
    run.load_state_dict(torch.load(file_of(folder, name, "first"), weights_only=True))
    for number in range(STEPS, 2 * STEPS):
        run.step(number)
    torch.save(run.result(), file_of(folder, name, "second"))
    casts_off()


if __name__ == "__main__":
    for each in CASES:
        second_half(each, Path(sys.argv[1]))

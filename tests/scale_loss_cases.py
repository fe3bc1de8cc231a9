"""Optimizers, and short ways to call handle.scale_loss, for its tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import F32, INF, parameter, pull
from torch import Tensor, nn

from apex_mp.optimizers import FusedAdam

SCALE = 65536.0


class PlainSgd:
    """An optimizer that knows nothing of torch's."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        self.param_groups = [{"params": [*params], "lr": lr}]
        self.calls: list[Any] = []

    def zero_grad(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None

    def step(self, closure: Any = None) -> Any:
        """Step."""
        loss = None if closure is None else closure()
        self.calls.append(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param -= self.param_groups[0]["lr"] * param.grad
        return loss


class Larc:
    """Rescales the learning rate around another optimizer, as apex.parallel.LARC does."""

    def __init__(self, optimizer: Any) -> None:
        self.optim = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optim.param_groups

    @property
    def state(self) -> Any:
        return self.optim.state

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        self.optim.step()


sgd = functools.partial(torch.optim.SGD, lr=0.5)
# "on CPU": torch's fused and capturable flags want kernels that not every device has.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": sgd,
    "SGD momentum nesterov": functools.partial(sgd, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "Rprop": torch.optim.Rprop,
    "FusedAdam": FusedAdam,
    "PlainSgd": PlainSgd,
    "Larc": lambda params: Larc(sgd(params)),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def param(values: Any, device: torch.device, dtype: torch.dtype = F32) -> nn.Parameter:
    return parameter(values, dtype, device)


def backward(handle: Any, loss: Tensor, optimizer: Any) -> None:
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def overflow(handle: Any, optimizer: Any, value: float = INF) -> None:
    backward(handle, pull((optimizer.param_groups[0]["params"][0], value)), optimizer)


def grads(*params: nn.Parameter) -> list[Tensor | None]:
    return [each.grad for each in params]

"""What the tests of amp.initialize share: a tiny network, its data, optimizers, and a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.amp import _amp_state
from apex_mp.optimizers import FusedAdam

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = float("inf")

LEVELS = ("O0", "O1", "O2", "O3")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, eps=1e-4),
}

levels = pytest.mark.parametrize("level", LEVELS)
dtypes = pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def linear(*values: float) -> nn.Linear:
    """A layer of one output whose weights are given."""
    layer = nn.Linear(len(values), 1, bias=False)
    layer.weight.data = torch.tensor([values])
    return layer


def sgd(*models: nn.Module, lr: float = 1.0, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=lr, **options)


class Net(nn.Module):
    """A convolution, the three usual normalizations, a recurrent cell, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.layer_norm = nn.LayerNorm(16)
        self.cell = nn.GRUCell(16, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group_norm(self.batch_norm(self.conv(x)).relu()).flatten(1)
        return self.out(self.cell(self.layer_norm(x)))


def batches(count: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images of three kinds of stripes with noise, and which kind each is."""
    for number in range(start, start + count):
        generator = torch.Generator().manual_seed(number)
        kinds = torch.arange(9) % 3
        images = 0.3 * torch.randn(9, 1, 4, 4, generator=generator)
        images[kinds == 1, :, ::2] += 1
        images[kinds == 2, :, :, ::2] += 1
        yield images, kinds


def train(
    model: Any, optimizer: Any, steps: int, *, start: int = 0, clip: float | None = None
) -> list[float]:
    """Train as every script does; return the losses."""
    losses = []
    for images, kinds in batches(steps, start):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), kinds)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_plain(model: Any, optimizer: Any, steps: int, *, start: int = 0) -> list[float]:
    """The same in float32 without amp."""
    losses = []
    for images, kinds in batches(steps, start):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), kinds)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """All numbers that training depends on: model, masters, state, scales."""
    tensors = [*model.parameters(), *model.buffers(), *amp.master_params(optimizer)]
    for param in amp.master_params(optimizer):
        state = optimizer.state[param]
        tensors += [torch.as_tensor(state[key]) for key in sorted(state) if state[key] is not None]
    scales = [[s.loss_scale(), s._unskipped] for s in _amp_state.loss_scalers]
    return [*(tensor.detach().clone() for tensor in tensors), torch.tensor(scales)]


def twins(make: Callable[[], nn.Module], count: int = 2) -> list[nn.Module]:
    """Return models with equal weights."""
    first = make()
    others = [make() for _ in range(count - 1)]
    for other in others:
        other.load_state_dict(first.state_dict())
    return [first, *others]


def initialize(*args: Any, **kwargs: Any) -> Any:
    """amp.initialize that prints nothing."""
    return amp.initialize(*args, **{"verbosity": 0, **kwargs})


def step(optimizer: Any, loss: Tensor, **kwargs: Any) -> Any:
    """Scale, go back, step."""
    backward(optimizer, loss, **kwargs)
    return optimizer.step()


def backward(optimizer: Any, loss: Tensor, **kwargs: Any) -> None:
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()

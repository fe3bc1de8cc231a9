"""amp.GradScaler with compiled models and with activation checkpoints: fp16 as without them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex_mp import amp
from apex_mp.optimizers import FusedAdam

STEPS = 6
OVERFLOW_AT = 2


class Network(nn.Module):
    """Two blocks; `around` calls each of them."""

    def __init__(
        self, around: Callable[..., Tensor] = lambda block, x: block(x), dropout: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 8))
            for _ in range(2)
        )
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x.float().square().mean()


def train(
    model: nn.Module,
    half: bool,
    device: torch.device,
    of_step: Callable[[Any], Any] = lambda step: step,
    how: str = "clip",
) -> tuple[list[Tensor], list[float]]:
    """Return weights and losses after a few steps, of which one overflows."""
    model = model.to(device, torch.float16 if half else torch.float32)
    optimizer = FusedAdam(model.parameters(), lr=0.05, master_weights=half)
    # Bounds have an operator of ours adjust the scale.
    scaler = amp.GradScaler(device.type, init_scale=2.0**10, min_scale=1.0)
    losses = []
    torch.manual_seed(1)

    def step(inputs: Tensor, factor: float) -> Tensor:
        with torch.autocast(device.type, torch.float16, enabled=not half):
            loss = model(inputs) * factor
        scaler.scale(loss).backward()
        if how == "clip":
            scaler.clip_grad_norm_(optimizer, 0.1)
        if how == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    run = of_step(step)
    for number in range(STEPS):
        inputs = torch.randn(4, 8, device=device, dtype=next(model.parameters()).dtype)
        losses.append(run(inputs, math.inf if number == OVERFLOW_AT else 1.0).item())
        assert scaler.step_was_skipped(optimizer) == (number == OVERFLOW_AT)
    assert scaler.get_scale() == 2.0**9
    return [param.detach() for param in model.parameters()], losses


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_with_checkpointed_activations_the_run_is_the_same_to_the_bit(
    use_reentrant: bool, half: bool, device: torch.device
) -> None:
    def around(block: nn.Module, x: Tensor) -> Tensor:
        # A reentrant checkpoint gives gradients only if an input requires them.
        return checkpoint(block, x.requires_grad_(), use_reentrant=use_reentrant)

    weights, losses = train(Network(dropout=0.1), half, device)
    actual = train(Network(around, dropout=0.1), half, device)
    torch.testing.assert_close(actual, (weights, losses), rtol=0, atol=0)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("half", "backend"),
    [
        (True, "aot_eager"),
        (False, "aot_eager"),
        # It compiles C++, for half a minute.
        pytest.param(True, "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_runs_as_the_plain_one(
    half: bool, backend: str, device: torch.device
) -> None:
    _, expected = train(Network(), half, device)
    torch._dynamo.reset()
    _, losses = train(torch.compile(Network(), backend=backend), half, device)
    # Inductor rounds elsewhere: 2e-7 of the loss at the most, with half=False 1.3e-4.
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("how", ["clip", "unscale", "only step"])
def test_a_compiled_step_runs_as_the_plain_one_and_the_scaler_is_not_traced(
    how: str, device: torch.device
) -> None:
    expected = train(Network(), True, device, how=how)
    torch._dynamo.reset()
    traced: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        traced.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    def of_step(step: Any) -> Any:
        return torch.compile(step, backend=backend)

    actual = train(Network(), True, device, of_step, how)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert any("tanh" in target.lower() for target in traced), traced
    assert not any("apex_mp" in target for target in traced)

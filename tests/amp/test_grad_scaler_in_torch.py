"""GradScaler with checkpoints and torch.compile, and graphs that are kept over a step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import F16, F32, FACES, INF, PROBES, parameter
from tolerances import assert_same_bits
from torch import Tensor, nn
from torch.nn import Parameter
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


@pytest.mark.slow
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


Step = Callable[[], Any]


Backward = Callable[..., None]


# From a parameter: what runs a loss backward, and what takes a step.
Maker = Callable[[Parameter], tuple[Backward, Step]]


def plain(cls: Callable[..., Any], **options: Any) -> Maker:
    def make(param: Parameter) -> tuple[Backward, Step]:
        return Tensor.backward, cls([param], lr=0.125, **options).step

    return make


def wrapped(face: str, probe: str) -> Maker:
    def make(param: Parameter) -> tuple[Backward, Step]:
        optimizer = FACES[face](PROBES[probe]([param], lr=0.125), static_loss_scale=4.0)
        return lambda loss, **more: optimizer.backward(loss, **more), optimizer.step

    return make


OPTIMIZERS = {
    "FusedAdam": plain(FusedAdam),
    "FusedAdam with masters": plain(FusedAdam, master_weights=True),
    **{
        f"{face}.FP16_Optimizer of {probe}": wrapped(face, probe)
        for face in FACES
        for probe in PROBES
    },
}


TORCHS = {
    "loop": plain(torch.optim.AdamW, foreach=False),
    "foreach": plain(torch.optim.AdamW, foreach=True),
}


optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


dtypes = pytest.mark.parametrize("dtype", [F16, F32], ids=["fp16", "fp32"])


def loss_of(param: Tensor) -> Tensor:
    """Return a loss whose backward needs the parameter as it was."""
    return (param * param).float().sum()


def refusal(make: Maker, param: Parameter) -> str:
    """Return what autograd says to a second backward after a step; versions count differently."""
    backward, step = make(param)
    loss = loss_of(param)
    backward(loss, retain_graph=True)
    step()
    with pytest.raises(RuntimeError) as caught:
        backward(loss)
    return re.sub(r"is at version [1-9]\d*", "is at a later version", str(caught.value))


@dtypes
@optimizers
def test_a_second_backward_after_a_step_raises_as_with_torch_optim(
    make: Maker, dtype: torch.dtype, device: torch.device
) -> None:
    said = refusal(make, parameter([1.0, 2.0, 3.0], dtype, device))
    for theirs in TORCHS.values():
        assert said == refusal(theirs, parameter([1.0, 2.0, 3.0], dtype, device))
    assert "modified by an inplace operation" in said
    assert "is at a later version; expected version 0" in said


@dtypes
@optimizers
def test_the_refused_backward_changes_no_weight_and_no_gradient(
    make: Maker, dtype: torch.dtype, device: torch.device
) -> None:
    param = parameter([1.0, 2.0, 3.0], dtype, device)
    backward, step = make(param)
    loss = loss_of(param)
    backward(loss, retain_graph=True)
    step()
    param.grad = None
    weights = param.detach().clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(loss)
    assert param.grad is None
    assert_same_bits(param.detach(), weights)


@pytest.mark.cpu_only  # On a GPU the host does not know that the step wrote nothing.
@dtypes
@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("face", FACES)
def test_a_skipped_step_of_fp16_optimizer_leaves_graphs_intact(
    face: str, probe: str, dtype: torch.dtype, device: torch.device
) -> None:
    param = parameter([1.0, 2.0, 3.0], dtype, device)
    optimizer = FACES[face](PROBES[probe]([param]), static_loss_scale=4.0, verbose=False)
    loss = loss_of(param)
    optimizer.backward(loss * INF, retain_graph=True)
    optimizer.step()
    assert optimizer.overflow
    optimizer.zero_grad()
    loss.backward()
    assert param.grad.tolist() == [2.0, 4.0, 6.0]

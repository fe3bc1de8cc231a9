"""No graph kept over a step can be run backward again: each optimizer does as torch.optim does.

The step bumps the version of each weight that it writes, and autograd compares. An optimizer that
did not would leave a second backward with the gradient at weights that are no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_cases import F16, F32, FACES, INF, PROBES, parameter
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdam

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

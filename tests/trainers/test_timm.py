"""timm's names of optimizers that are apex's: create_optimizer_v2(model, "fusedadamw")."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch

import apex_mp
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

pytestmark = pytest.mark.cpu_only
TORCHVISION = Path(sys.prefix) / "torchvision"
# The operators of PyPI's torchvision are compiled for CUDA and do not load where torch is not.
# Importing it then fails for want of these two.
DECLARE = """
import torch
for name in ("nms", "qnms"):
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    torch.library.define(f"torchvision::{name}", schema)
"""
DECLARE = "" if torch.version.cuda else DECLARE


@functools.cache
def declare() -> None:
    """Declare the operators, which can be done once in a process."""
    exec(DECLARE, {})


@pytest.fixture(scope="module", autouse=True)
def apex() -> Iterator[None]:
    """Let timm be imported, and find apex."""
    declare()
    sys.path.append(str(TORCHVISION))
    apex_mp.install_as_apex(era="2020")
    yield
    apex_mp.uninstall_as_apex()
    sys.path.remove(str(TORCHVISION))


def create(model: torch.nn.Module, name: str, **options: Any) -> Any:
    """Make an optimizer by timm, which makes those of apex only where there is a GPU."""
    from timm.optim import create_optimizer_v2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        return create_optimizer_v2(model, name, **options)


@pytest.mark.parametrize(
    ("name", "expected", "options"),
    [
        ("fusedadam", FusedAdam, {"adam_w_mode": False}),
        ("fusedadamw", FusedAdam, {"adam_w_mode": True}),
        ("fusedsgd", FusedSGD, {"momentum": 0.9, "nesterov": True}),
        ("fusedlamb", FusedLAMB, {"betas": (0.9, 0.999), "max_grad_norm": 1.0}),
        ("fusednovograd", FusedNovoGrad, {"betas": (0.95, 0.98)}),
    ],
)
def test_names_of_apex_make_optimizers_of_apex_mp(
    name: str, expected: type, options: dict[str, Any]
) -> None:
    model = tasks.model()
    optimizer = create(model, name, lr=0.1, weight_decay=0.05)
    assert isinstance(optimizer, expected)
    biases, weights = optimizer.param_groups
    assert (biases["weight_decay"], weights["weight_decay"]) == (0.0, 0.05)
    assert {option: weights[option] for option in options} == options
    assert weights["lr"] == 0.1


def losses_of(model: torch.nn.Module, optimizer: Any, autocast: bool = False) -> list[float]:
    scaler, losses = GradScaler("cpu"), []
    for batch in tasks.batches():
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = tasks.loss_of(model, batch)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def test_a_half_model_learns_with_a_scaler() -> None:
    model = tasks.model().half()
    optimizer = create(model, "fusedadamw", lr=tasks.LR, weight_decay=0.0, master_weights=True)
    tasks.assert_same_course(losses_of(model, optimizer), tasks.fp32_losses())


SCRIPT = f"""
import sys, torch
sys.path.append({str(TORCHVISION)!r})
{DECLARE}
import timm.optim
model = torch.nn.Linear(4, 2)
optimizer = timm.optim.create_optimizer_v2(model, "fusedadamw", lr=0.1, weight_decay=0.05)
before = model.weight.clone()
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
print(type(optimizer).__name__, torch.equal(before, model.weight))
"""


def test_a_script_runs_unchanged_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "apex_mp", "run", "--device", "cpu", "--era", "2020"]
    printed = subprocess.check_output([*command, "script.py"], cwd=tmp_path, text=True)
    assert printed == "FusedAdam False\n"

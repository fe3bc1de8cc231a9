"""docs/fp16_today.md: its code runs, torch refuses what it says, and its figures are counted."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedSGD

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fp16_today.md").read_text()
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
FOLDED, REPORT, AVERAGE, WIDE_GRADS, MASTERS, MUON = re.findall(
    r"```python\n(.*?)```", PAGE, re.DOTALL
)


def names(device: torch.device) -> dict[str, Any]:
    """What stands around the code: a model, and batches it can learn."""
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    inputs = torch.randn(64, 4, device=device)
    labels = (inputs[:, 0] > 0).long()
    batches = [(inputs, labels)] * 100
    return {"torch": torch, "device": device.type, "model": model, "batches": batches}


def run(code: str, device: torch.device) -> dict[str, Any]:
    there = names(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(code, there)
    inputs, labels = there["batches"][0]
    guesses = there["model"](inputs.half()).argmax(1)
    assert (guesses == labels).float().mean().item() > 0.95
    assert {param.dtype for param in there["model"].parameters()} == {torch.float16}
    return there


def side(sign: str) -> str:
    lines = DIFF.splitlines()
    return "\n".join(line[1:] for line in lines if not line.startswith("+-".replace(sign, "")))


def test_torch_refuses_the_loop_before_the_change(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        exec(side("-"), names(device))


def test_the_loop_trains_after_the_change(device: torch.device) -> None:
    assert isinstance(run(side("+"), device)["scaler"], GradScaler)


def test_the_average_is_a_float32_model(device: torch.device) -> None:
    there = run(FOLDED, device)
    exec(AVERAGE, there)
    assert {param.dtype for param in there["averaged"].module.parameters()} == {torch.float32}


def test_the_loop_with_folded_clipping_trains_and_is_reported(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    there = run(FOLDED, device)
    assert len(FOLDED.split("\n\n")[1].splitlines()) <= 13
    model, scaler, optimizer = there["model"], there["scaler"], there["optimizer"]
    assert there["scheduler"].get_last_lr()[0] == pytest.approx(1e-2 * 0.99**100)
    exec(REPORT, there)
    assert capsys.readouterr().out == ""
    scaler.scale(torch.zeros((), device=device))
    model[2].weight.grad.view(-1)[:3] = math.inf
    scaler.step(optimizer)
    exec(REPORT, there)
    assert capsys.readouterr().out == "2.weight [2, 16]: 3 inf, 0 NaN\n"


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.11 may lack it")
@pytest.mark.parametrize(("count", "error"), [(16, 0.0005), (1024, 0.004)])
def test_sums_of_gradients_are_as_far_off_as_the_page_says(
    count: int, error: float, device: torch.device
) -> None:
    for wide in (False, True):
        model = nn.ParameterList([nn.Parameter(torch.zeros(1000, device=device).half())])
        if wide:
            exec(WIDE_GRADS, {"model": model, "torch": torch})
        (param,) = model
        optimizer = FusedSGD(model.parameters(), lr=1.0, master_weights=True)
        scaler = GradScaler(device.type, init_scale=1024.0)
        generator, right = torch.Generator().manual_seed(0), torch.zeros(1000, dtype=torch.float64)
        for _ in range(count):
            grad = (torch.randn(1000, generator=generator) * 0.5 + 1.0).half()
            right += grad.double() / count
            loss = (param.float() * grad.float().to(device)).sum() / count
            scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        off = (-optimizer.master(param).double().cpu() - right).norm() / right.norm()
        if wide:
            assert off < 1e-6
        else:
            assert off.item() == pytest.approx(error, rel=0.3)


@pytest.mark.parametrize("wide", [False, True], ids=["float16 loss", "float32 loss"])
def test_a_float16_loss_skips_the_first_step(wide: bool, device: torch.device) -> None:
    there = names(device)
    model = there["model"].to(device).half()
    inputs, labels = there["batches"][0]
    logits = model(inputs.half())
    loss = nn.functional.cross_entropy(logits.float() if wide else logits, labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler(device.type)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.scale(loss).backward()
    told = ["the loss is float16 and the scale is 65536" in str(each.message) for each in caught]
    assert told == ([] if wide else [True])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # There are no masters.
        scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) == (not wide)


def test_the_version_and_the_figures_are_those_of_the_tests() -> None:
    assert "torch 2.13" in PAGE
    clipping = (Path(__file__).parents[1] / "amp" / "test_grad_scaler_clip.py").read_text()
    assert '{"unscale_": 15, "clip_grad_norm_": 31, "step alone": 31}' in clipping
    assert "leaves 15 of 31 as they were and 16 are 0" in PAGE


def test_half_turns_a_rotary_embedding_by_the_angle_that_the_page_names() -> None:
    """With heads of 32 numbers."""
    exact = 1.0 / 10000 ** (torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    error = (exact.half().double() - exact).abs().max().item() * 4095
    assert f"{error:.2f} rad at position 4095" in PAGE


def test_masters_for_any_optimizer_train(device: torch.device) -> None:
    optimizer = run(MASTERS, device)["optimizer"]
    assert isinstance(optimizer, torch.optim.RMSprop)


def test_muon_trains_the_matrices_and_another_optimizer_the_rest(device: torch.device) -> None:
    before = MASTERS.partition("\noptimizer")[0]
    muon, other = run(f"{before}\n{MUON}", device)["optimizers"]
    assert isinstance(muon, torch.optim.Muon)
    assert {param.ndim for param in other.param_groups[0]["params"]} == {1}

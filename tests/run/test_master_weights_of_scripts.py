"""Masters under `use_master_weights` for what scripts do besides, and what its report says."""

from __future__ import annotations

import abc
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import assert_same_bits
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import apex_mp
from apex_mp.optimizers import FusedAdam, MasterWeights

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
OPTIMIZERS = [torch.optim.SGD, torch.optim.RMSprop]  # By a rule, and by torch's own step.


def ones(dtype: torch.dtype, size: int = 4) -> Parameter:
    return Parameter(torch.ones(size, dtype=dtype))


def train(optimizer: Any, param: Parameter, count: int, grad: float = 2.0**-3) -> None:
    for _ in range(count):
        param.grad = torch.full_like(param, grad)
        optimizer.step()


def in_both(script: Callable[[torch.dtype], Any], dtype: torch.dtype = BF16) -> tuple[Any, Any]:
    """What a script returns with float32 weights, and with 16-bit ones in the block."""
    expected = script(F32)
    with apex_mp.use_master_weights():
        found = script(dtype)
    return expected, found


# --- Hooks of steps.


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_hooks_see_unscaled_gradients_before_and_after_and_no_skipped_step(kind: Any) -> None:
    def script(dtype: torch.dtype) -> list[Any]:
        param, seen = ones(dtype), list[Any]()
        optimizer = kind([param], lr=2.0**-6)
        optimizer.register_step_pre_hook(lambda *_: seen.append(param.grad.float().clone()))
        optimizer.register_step_post_hook(lambda *_: seen.append(param.grad.float().clone()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(4):
            optimizer.zero_grad()
            factor = torch.inf if step == 2 else 2.0**-7
            scaler.scale((param.float() * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return seen

    expected, found = in_both(script, F16)
    assert len(found) == len(expected) == 6
    for one, other in zip(expected, found, strict=True):
        assert_same_bits(other, one)


# --- Optimizers around others, and of other bases.


class SlowWeights(torch.optim.Optimizer):
    """As Lookahead (Zhang et al. 2019): around an optimizer, without torch's constructor."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0
        self.slow: dict[Tensor, Tensor] = {}
        self.param_groups, self.defaults = inner.param_groups, inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 6 == 0:
            for param in self.param_groups[0]["params"]:
                slow = self.slow.setdefault(param, param.clone())
                param.copy_(slow.lerp_(param, 0.5))


class SlowFromTheStart(SlowWeights):
    """Copies weights in the constructor, and has the attributes for hooks of torch's."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._optimizer_step_pre_hooks: dict[Any, Any] = {}
        self._optimizer_step_post_hooks: dict[Any, Any] = {}
        for group in inner.param_groups:
            self.slow.update({param: param.detach().clone() for param in group["params"]})


@pytest.mark.parametrize("kind", [*OPTIMIZERS, torch.optim.AdamW])
@pytest.mark.parametrize("around", [SlowWeights, SlowFromTheStart])
def test_an_optimizer_around_another_averages_in_float32(around: Any, kind: Any) -> None:
    def script(dtype: torch.dtype) -> Tensor:
        param = ones(dtype)
        optimizer = around(kind([param], lr=2.0**-12))
        train(optimizer, param, 60)
        return param.detach() if dtype == F32 else optimizer.master(param)  # type: ignore[attr-defined]

    expected, found = in_both(script)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (1 - expected).min() > 2e-4


class Base(abc.ABC, torch.optim.Optimizer):
    """As the base of collections of optimizers."""


class Sign(Base):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad.sign(), alpha=-group["lr"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: given])
def test_optimizers_whatever_their_bases_get_masters(copied: Callable[[Any], Any]) -> None:
    with apex_mp.use_master_weights():
        param, optimizer = copied((param := ones(BF16), Sign([param], lr=2.0**-14)))
        train(optimizer, param, 64)
    assert_same_bits(optimizer.master(param), torch.full((4,), 1 - 2.0**-8))


class Joinable:
    """As a base of torch's ZeroRedundancyOptimizer, which calls the next one in line."""

    def __init__(self) -> None:
        super().__init__()
        self.is_joinable = True


class Joined(torch.optim.SGD, Joinable):
    def __init__(self, params: Any, **options: Any) -> None:
        torch.optim.SGD.__init__(self, params, **options)
        Joinable.__init__(self)


def test_constructors_of_several_bases_are_called_to_their_end() -> None:
    with apex_mp.use_master_weights():
        param = ones(BF16)
        optimizer = Joined([param], lr=2.0**-10)
        train(optimizer, param, 2)
    assert optimizer.is_joinable
    assert_same_bits(optimizer.master(param), torch.full((4,), 1 - 2.0**-12))  # type: ignore[attr-defined]


# --- Averages, and casts to and fro.


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_average_of_the_script_is_one_of_masters(kind: Any) -> None:
    def script(dtype: torch.dtype) -> list[Tensor]:
        model = nn.Linear(4, 4)
        nn.init.ones_(model.weight)
        model.to(dtype)
        optimizer = kind([model.weight], lr=2.0**-10)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(60):
            train(optimizer, model.weight, 1)
            averaged.update_parameters(model)
        assert averaged.module.weight.dtype == dtype
        return [averaged.module.weight.detach().float()]

    (expected,), (found,) = in_both(script)
    # Half of the distance between two bfloat16; without masters it stays at 1.
    torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-9)
    assert (1 - expected).min() > 2.0**-8


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("trains_in_float32", [False, True])
def test_a_model_that_is_cast_to_float32_and_back_keeps_its_masters(
    trains_in_float32: bool, kind: Any
) -> None:
    def script(dtype: torch.dtype) -> Tensor:
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        model.to(dtype)
        optimizer = kind(model.parameters(), lr=2.0**-12)
        for _ in range(8):
            train(optimizer, model.weight, 5)
            model.float()
            if trains_in_float32:  # Half of the weights move.
                model.weight.grad = torch.full((4, 4), 2.0**-3)
                model.weight.grad[2:] = 0.0
                optimizer.step()
            model.to(dtype)
        return model.weight.detach() if dtype == F32 else optimizer.master(model.weight)

    expected, found = in_both(script)
    torch.testing.assert_close(found[2:], expected[2:], rtol=0, atol=1e-6)
    # Steps in float32 begin with the rounded weights.
    tolerance = 2.0**-6 if trains_in_float32 else 1e-6
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=tolerance)


# --- The report.


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_there_is_one_line_for_many_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    with apex_mp.use_master_weights():
        params = [ones(BF16) for _ in range(50)]
        for param in params:
            train(torch.optim.AdamW([param]), param, 2)
    assert said(capsys) == [
        "apex_mp: 50 optimizers of AdamW stepped float32 masters of 50 parameters in 16 bits "
        "(400 bytes); 100 steps without a scaler"
    ]


def test_masters_that_took_no_step_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with apex_mp.use_master_weights():
        param = ones(BF16)
        optimizer = torch.optim.AdamW([param])
    train(optimizer, param, 1)
    assert isinstance(optimizer, MasterWeights)
    assert said(capsys) == ["apex_mp: AdamW has float32 masters, and took no step"]


def test_writes_from_outside_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with apex_mp.use_master_weights():
        param = ones(BF16)
        optimizer = torch.optim.NAdam([param])
        for _ in range(3):
            train(optimizer, param, 2)
            with torch.no_grad():
                param.clamp_(max=0.5)
    (line,) = said(capsys)
    assert line.endswith(
        "; 6 steps without a scaler; before 2 of them weights were written outside"
    )


def test_parameters_without_masters_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = ones(BF16)
    optimizer = torch.optim.SGD([before], lr=0.1)
    with apex_mp.use_master_weights():
        param = ones(BF16)
        train(optimizer, before, 2)
        train(torch.optim.Adam([param]), param, 1)
    assert said(capsys)[1:] == ["apex_mp: SGD stepped 1 parameter in 16 bits without masters"]


@pytest.mark.parametrize("kind", [True, "float32"])
def test_the_kind_of_masters_can_be_chosen(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with apex_mp.use_master_weights(kind):
        for make in (torch.optim.AdamW, FusedAdam):
            param = ones(BF16)
            train(make([param]), param, 1)
    size = 16 if kind == "float32" else 8
    assert [f"({size} bytes)" in line for line in said(capsys)] == [True, True]


def test_another_kind_is_refused() -> None:
    block = apex_mp.use_master_weights("half")
    with pytest.raises(ValueError, match=r"use_master_weights: master_weights is 'half'; it must"):
        block.__enter__()


# --- The command line.

SCRIPT = """
import importlib.util
import torch
if {alone}:  # A differentiable step has no masters.
    param = torch.ones(4).half().requires_grad_().clone()
    optimizer = torch.optim.SGD([param], lr=0.1, differentiable=True)
else:
    param = torch.nn.Parameter(torch.ones(4).half())
    optimizer = torch.optim.AdamW([param])
param.grad = torch.ones(4).half()
optimizer.step()
print(torch.amp.GradScaler("cpu").get_scale(), importlib.util.find_spec("apex") is not None)
"""


def run(tmp_path: Path, alone: bool, *words: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(alone=alone))
    return subprocess.run(
        [sys.executable, "-m", "apex_mp", "run", "--master-weights", *words, str(script)],
        cwd=Path(apex_mp.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.cpu_only
def test_options_of_the_command(tmp_path: Path) -> None:
    ended = run(tmp_path, False, "--strict", "--init-scale", "128", "--no-apex")
    assert (ended.returncode, ended.stdout) == (0, "128.0 False\n"), ended.stderr
    ended = run(tmp_path, True, "--strict")
    assert ended.returncode == 3
    assert ended.stdout == "65536.0 True\n"
    assert "apex_mp: SGD stepped 1 parameter in 16 bits without masters" in ended.stderr
    assert run(tmp_path, True).returncode == 0
    refused = run(tmp_path, False, "--init-scale", "0")
    assert refused.returncode == 2
    assert "--init-scale is 0.0; it must be more than 0" in refused.stderr

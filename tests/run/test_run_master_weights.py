"""Scripts of today with 16-bit weights: `run --master-weights`, and the same as one call."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import assert_same_bits
from torch import Tensor, nn

import apex_mp
from apex_mp.optimizers import FusedAdam, MasterWeights

F16, BF16 = torch.float16, torch.bfloat16
STEPS = 40


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2))


def losses_of(model: nn.Module, optimizer: Any, scaler: Any, *, clip: bool = False) -> list[float]:
    """A loop as in torch's tutorial on mixed precision."""
    dtype = next(model.parameters()).dtype
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        inputs = torch.randn(64, 16)
        outputs = model(inputs.to(dtype)).float()
        loss = nn.functional.cross_entropy(outputs, (inputs[:, 0] > 0).long())
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def by_half_before(make: Callable[..., Any]) -> tuple[nn.Module, Any]:
    model = network().half()
    return model, make(model.parameters())


def by_half_after(make: Callable[..., Any]) -> tuple[nn.Module, Any]:
    model = network()
    optimizer = make(model.parameters())
    return model.half(), optimizer


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=1e-3)


@pytest.fixture
def in_float32() -> list[float]:
    model = network()
    return losses_of(model, adamw(model.parameters()), torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("start", [by_half_before, by_half_after])
def test_a_float16_loop_stops_alone_and_trains_as_float32_here(
    start: Callable[..., Any], clip: bool, in_float32: list[float]
) -> None:
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        losses_of(*start(adamw), torch.amp.GradScaler("cpu"), clip=True)
    with apex_mp.use_master_weights():
        losses = losses_of(*start(adamw), torch.amp.GradScaler("cpu"), clip=clip)
    torch.testing.assert_close(losses, in_float32, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "Adafactor", "NAdam", "RAdam"])
def test_bfloat16_weights_lose_their_updates_alone_and_train_as_float32_here(name: str) -> None:
    def run(dtype: torch.dtype) -> list[float]:
        model = network().to(dtype)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=2e-4)
        return losses_of(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))

    float32, alone = run(torch.float32), run(BF16)
    with apex_mp.use_master_weights():
        ours = run(BF16)
    assert abs(ours[-1] - float32[-1]) < 1e-3
    assert abs(ours[-1] - float32[-1]) < abs(alone[-1] - float32[-1])


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_masters_of_a_model_that_is_cast_later_hold_its_float32_weights(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network()
    before = [param.detach().clone() for param in model.parameters()]
    with apex_mp.use_master_weights():
        optimizer: Any = getattr(torch.optim, name)(model.parameters(), lr=0.0, weight_decay=0.0)
        model.half()
        losses_of(model, optimizer, torch.amp.GradScaler("cpu"))
    for param, expected in zip(model.parameters(), before, strict=True):
        assert_same_bits(optimizer.master(param), expected)
    said = capsys.readouterr().err
    assert f"the weights of {name} became 16-bit after it was made; its masters hold the" in said
    nbytes = "2,436" if name == "AdamW" else "4,872"  # Split where the step is fused.
    assert f"{name} stepped float32 masters of 4 parameters in 16 bits ({nbytes} bytes); 0" in said


def test_the_step_that_a_scheduler_keeps_is_the_one_with_masters() -> None:
    class Before(torch.optim.SGD):
        """An optimizer's class that was used before."""

    Before([nn.Parameter(torch.ones(1))], lr=0.1)
    own = Before.step
    with apex_mp.use_master_weights():
        param = nn.Linear(1, 1, bias=False)
        nn.init.ones_(param.weight)
        optimizer = Before(param.parameters(), lr=1e-3)
        torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        param.bfloat16()
        for _ in range(100):
            param.weight.grad = torch.ones_like(param.weight)
            optimizer.step()
    assert abs(param.weight.item() - 0.9) < 2.0**-9
    assert Before.step is own


def test_what_was_trained_in_float32_in_between_counts() -> None:
    with apex_mp.use_master_weights():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        model.bfloat16().float()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        assert "master_param" not in optimizer.state_dict()["state"].get(0, {})
        model.bfloat16()
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    assert abs(optimizer.master(model.weight).item() - 0.9999) < 1e-6


def test_fused_optimizers_without_masters_get_some() -> None:
    with apex_mp.use_master_weights():
        param = nn.Parameter(torch.ones(4, dtype=BF16))
        optimizer = FusedAdam([param], lr=1e-5)
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert optimizer.master(param)[0] < 1.0


def test_skipped_steps_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with apex_mp.use_master_weights():
        param = nn.Parameter(torch.ones(4, dtype=F16))
        optimizer, scaler = adamw([param]), torch.cpu.amp.GradScaler(init_scale=2.0**15)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(param.float().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**14
    assert "1 parameter in 16 bits (8 bytes); 1 of 3 steps skipped" in capsys.readouterr().err


def test_float32_scripts_are_as_they_were_and_names_are_restored(
    in_float32: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("torch.amp", "torch.cuda.amp", "torch.cpu.amp", "torch.amp.grad_scaler")
    before = [sys.modules[name].GradScaler for name in names]
    with apex_mp.use_master_weights():
        model = network()
        optimizer = adamw(model.parameters())
        assert losses_of(model, optimizer, torch.amp.GradScaler("cpu")) == in_float32
        assert not isinstance(optimizer, MasterWeights)
        scalers = [sys.modules[name].GradScaler for name in names]
        assert all(issubclass(scaler, apex_mp.amp.GradScaler) for scaler in scalers)
    assert [sys.modules[name].GradScaler for name in names] == before
    assert "no optimizer was given masters" in capsys.readouterr().err


def test_optimizers_with_masters_of_their_own_stay_alone() -> None:
    with apex_mp.use_master_weights():
        params = [nn.Parameter(torch.ones(4, dtype=F16))]
        fused = FusedAdam(params, lr=0.1, master_weights=True)
        assert type(fused) is FusedAdam
        # As in Megatron: made of 16-bit parameters, whose masters replace them.
        optimizer = adamw(params)
        optimizer.param_groups[0]["params"] = masters = [nn.Parameter(torch.ones(4))]
        masters[0].grad = torch.ones(4)
        optimizer.step()
    twin = nn.Parameter(torch.ones(4))
    twin.grad = torch.ones(4)
    adamw([twin]).step()
    assert_same_bits(masters[0].detach(), twin.detach())


FROM_BEFORE = torch.amp.GradScaler  # As `from torch.amp import GradScaler` at the head of a file.


@pytest.mark.parametrize("name", ["torch.amp", "torch.cuda.amp", "torch.cpu.amp"])
def test_a_scaler_that_was_imported_before_is_ours(name: str) -> None:
    before: Any = sys.modules[name].GradScaler
    arguments = ["cpu"] if name == "torch.amp" else []
    with apex_mp.use_master_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # There may be no GPU.
        scaler = before(*arguments, init_scale=8.0)
        assert isinstance(scaler, apex_mp.amp.GradScaler)
        assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert type(before(*arguments)) is before


def test_a_second_block_gives_masters_again() -> None:
    for _ in range(2):
        with apex_mp.use_master_weights():
            model, optimizer = by_half_after(lambda params: torch.optim.RMSprop(params, lr=1e-3))
            losses_of(model, optimizer, FROM_BEFORE("cpu"))
        assert isinstance(optimizer, MasterWeights)
        assert len(optimizer._own_masters.kept) == 4


def test_a_scaler_of_the_scripts_own_is_a_subclass_of_ours() -> None:
    with apex_mp.use_master_weights():

        class Scaler(torch.amp.GradScaler):
            def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
                return super()._unscale_grads_(optimizer, *args[:2], True)

        model = network().half()
        losses = losses_of(model, adamw(model.parameters()), Scaler("cpu"), clip=True)
    assert losses[-1] < losses[0]


def test_checkpoints_are_torchs_both_ways() -> None:
    def stepped(optimizer: Any, model: nn.Module) -> list[Tensor]:
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
        return [param.detach() for param in model.parameters()]

    with apex_mp.use_master_weights():
        model = network().half()
        optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cpu")
        stepped(optimizer, model)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    alone = network().half()
    alone.load_state_dict(saved[0])
    plain, of_torch = adamw(alone.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0)
    plain.load_state_dict(saved[1])
    of_torch.load_state_dict(saved[2])
    assert of_torch.get_scale() == 2.0**16
    for one, other in zip(stepped(plain, alone), stepped(optimizer, model), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2.0**-10)  # It steps in float16.
    with apex_mp.use_master_weights():
        again = network().half()
        optimizer = adamw(again.parameters())
        optimizer.load_state_dict(plain.state_dict())
        again.load_state_dict(alone.state_dict())
        weights = stepped(optimizer, again)
        for one, other in zip(weights, stepped(plain, alone), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2.0**-10)


# By the command line.

SCRIPT = """
import subprocess, sys, torch
def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 2).cuda().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.cuda.amp.GradScaler()
    for step in range(5):
        loss = model(torch.randn(8, 16).cuda().half()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}", scaler.is_enabled())
if sys.argv[1] == "parent":
    subprocess.run([sys.executable, __file__, "child"], check=True)
else:
    train()
"""


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "apex_mp", "run", "--device", "cpu", *words[:-1]]
    return subprocess.run(
        [*command, str(script), words[-1]],
        cwd=Path(apex_mp.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.cpu_only
def test_a_script_and_its_children_train_by_one_option_and_the_error_names_it(
    tmp_path: Path,
) -> None:
    stopped = run(tmp_path, "here")
    assert stopped.returncode == 1
    assert "ValueError: Attempting to unscale FP16 gradients." in stopped.stderr
    assert "apex_mp run: --master-weights trains float16 weights" in stopped.stderr
    for where in ("here", "parent"):
        ended = run(tmp_path, "--master-weights", where)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("loss ")
        assert ended.stdout.endswith("True\n")
        assert "AdamW stepped float32 masters of 2 parameters" in ended.stderr
        assert ended.stderr.count("no optimizer was given") == (where == "parent")

"""docs/checkpoints.md: its code runs, and its tables have the keys that we write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pickle_cases import module_of
from torch import nn

from apex_mp import amp, fp16_utils, optimizers
from apex_mp.optimizers import FusedAdam

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
SAVE, RESUME, LEAVE, OPEN, CONVERT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)


def new_training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).half()
    optimizer = optimizers.FusedAdamW(model.parameters(), lr=1e-2, master_weights=True)
    scaler = amp.GradScaler("cpu", growth_interval=2)
    return {"torch": torch, "model": model, "optimizer": optimizer, "scaler": scaler}


def train(training: dict[str, Any], steps: range) -> list[torch.Tensor]:
    model, optimizer, scaler = (training[name] for name in ("model", "optimizer", "scaler"))
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaler.scale(model(inputs.half()).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    masters = [optimizer.master(param) for param in model.parameters()]
    return [*masters, torch.tensor(scaler.get_scale())]


def test_a_training_that_is_saved_and_resumed_goes_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training = new_training()
    train(training, range(5))
    exec(SAVE, training)
    expected = train(training, range(5, 9))
    resumed = new_training()
    exec(RESUME, resumed)
    assert all(map(torch.equal, train(resumed, range(5, 9)), expected))


def test_torch_goes_on_in_float32_from_what_is_left(tmp_path: Path) -> None:
    training = new_training()
    masters = train(training, range(5))
    training["model32"] = nn.Linear(4, 2)
    exec(LEAVE, training)
    for param, master in zip(training["model32"].parameters(), masters, strict=False):
        assert torch.equal(param, master)
    (group,) = training["optimizer32"].param_groups
    assert group["lr"] == 1e-2
    assert "max_grad_norm" not in group
    for state in training["optimizer32"].state.values():
        assert {*state} == {"step", "exp_avg", "exp_avg_sq"}


def test_the_code_that_opens_an_old_file_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2).half()
    optimizer = fp16_utils.FP16_Optimizer(FusedAdam(model.parameters()), verbose=False)
    with module_of("apex.fp16_utils.loss_scaler.LossScaler") as made:
        scaler: Any = made()
        scaler.cur_scale = 64.0
        old = {**optimizer.state_dict(), "loss_scaler": scaler}
        torch.save({"model": model.state_dict(), "optimizer": old}, "checkpoint.pt")
    exec(OPEN, {"model": model, "optimizer": optimizer})
    assert optimizer.loss_scale == 64.0


def test_the_code_that_converts_runs_and_says_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    net = Net()
    torch.save(net.state_dict(), "float32.pt")
    exec(CONVERT, {"torch": torch, "Net": Net})
    masters = torch.load("masters.pt", weights_only=True)
    assert all(torch.equal(masters[name], value) for name, value in net.state_dict().items())
    said = re.findall(r"^(\S+ from \S+ to \S+)$", PAGE, re.MULTILINE)
    assert len(said) == 3
    assert {*said} <= {*capsys.readouterr().out.splitlines()}


def test_every_key_that_we_write_is_on_the_page() -> None:
    handle = amp.init(device_type="cpu")
    keys = {*handle.state_dict(), *handle.state_dict()["loss_scaler0"]}
    for face in (fp16_utils.FP16_Optimizer, optimizers.FP16_Optimizer):
        model = nn.Linear(2, 2).half()
        keys |= {*face(FusedAdam(model.parameters()), 1.0, True, verbose=False).state_dict()}
    keys |= {*handle.wrap_optimizer(FusedAdam(Net().parameters())).state_dict()}
    assert {key for key in keys if f"`{key}`" not in PAGE} == set()

"""A forked process frees no event, no pinned memory and no plan; it reads no number on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import apex_mp
from apex_mp.amp import GradScaler
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.loss_scale import DynamicLossScale
from apex_mp.optimizers import FusedAdam
from apex_mp.scale.device_scale import DeviceScale

PROGRAM = Path(__file__).parents[1] / "forked_program.py"


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.slow
def test_children_free_nothing_that_needs_cuda_in_any_state_of_the_parent(
    device: torch.device, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, device.type, ended],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(apex_mp.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    if device.type == "cpu":
        main = done.stdout.split()[-1]
        assert {*ended.read_text().split()} == {main}


@pytest.fixture
def scale_on_gpu() -> DeviceScale:
    """A scale on a GPU that is not there, and so has no numbers."""
    with FakeTensorMode():
        return DeviceScale(DynamicLossScale(2.0), torch.device("cuda"))


def of_grad_scaler(scale: DeviceScale) -> object:
    scaler = GradScaler("cpu")
    scaler._scale = scale.scale
    return scaler.get_scale()


def of_fp16_optimizer(scale: DeviceScale) -> object:
    optimizer = FP16_Optimizer(FusedAdam([torch.nn.Parameter(torch.ones(1))]))
    optimizer._device_scale._scale = scale
    return optimizer.loss_scale


@pytest.mark.parametrize("read", [DeviceScale.read, of_grad_scaler, of_fp16_optimizer])
def test_a_child_that_reads_a_scale_on_a_gpu_is_refused_with_a_wish(
    read: Callable[[DeviceScale], object],
    scale_on_gpu: DeviceScale,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match=r"scale is on cuda.*, and this process was forked"):
        read(scale_on_gpu)

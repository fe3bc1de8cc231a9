"""What a Monitor does when steps are skipped in a row, and when the loss scale cannot go lower."""

from __future__ import annotations

import logging
import pickle
import warnings
from typing import Any

import pytest
import torch
from fp16_cases import INF, PROBES, ones, pull, wrap
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.core import readback
from apex_mp.monitor import LossScaleExhaustedError, Monitor
from apex_mp.scale import device_scale

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


both_paths = pytest.mark.parametrize("device_path", [False, True], ids=["host", "device"])


class Sick(nn.Module):
    """Its backward makes inf of a batch that is not positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0.0).clamp(min=0.0).sqrt() if (x < 0).all() else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.sick = Sick()

    def forward(self, x: Tensor) -> Tensor:
        return self.sick(self.weight * x).sum()


def train(optimizer: Any, monitor: Monitor, model: Model, signs: str) -> None:
    for sign in signs:
        x = torch.ones(2, dtype=torch.float16) * (1.0 if sign == "+" else -1.0)
        monitor.run = lambda x=x: model(x)  # type: ignore[misc]
        optimizer.zero_grad()
        optimizer.backward(model(x))
        optimizer.step()
    readback.wait()


@pytest.fixture
def paths(device_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_path:
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {"cpu"})


def watched(scale: float = 8.0, **more: Any) -> tuple[Any, Monitor, Model]:
    model = Model()
    optimizer = wrap(
        PROBES["fused"](model.parameters()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": scale},
    )
    return optimizer, Monitor(optimizer, model=model, **more), model


@both_paths
@pytest.mark.usefixtures("paths")
def test_after_so_many_skips_the_batch_is_run_again(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, monitor, model = watched(after=2)
    with caplog.at_level(logging.WARNING, "apex_mp.monitor"):
        train(optimizer, monitor, model, "+-+--+")
    assert [step.skipped for step in monitor.history.steps] == [c == "-" for c in "+-+--+"]
    assert [*monitor.history.origins] == [5]
    assert monitor.history.origins[5].startswith(
        "inf or NaN begins in the backward of sick (Sick), in SqrtBackward0"
    )
    assert "step 5: inf or NaN begins in the backward of sick" in monitor.report()
    assert [each.getMessage().splitlines()[0] for each in caplog.records] == [
        "2 steps in a row were skipped; inf or NaN begins in the backward of sick (Sick), in "
        "SqrtBackward0"
    ]


def test_the_batch_of_the_skipped_step_is_run_again_and_not_the_present_one() -> None:
    model = Model()
    monitor = Monitor(model=model, after=1)
    monitor.run = lambda: model(-torch.ones(2).half())
    monitor.before_step(scale=8.0)
    monitor.run = lambda: model(torch.ones(2).half())
    monitor.record(scale=8.0, skipped=True)  # On a GPU it is known as late.
    assert "sick" in monitor.history.origins[1]


@pytest.mark.filterwarnings("ignore:.*gradients hold NaN, and no inf")
@both_paths
@pytest.mark.usefixtures("paths")
def test_a_skip_at_the_smallest_scale_raises_with_the_diagnosis() -> None:
    optimizer, monitor, model = watched(scale=2.0, at_minimum="raise")
    with pytest.raises(LossScaleExhaustedError) as caught:
        train(optimizer, monitor, model, "--+")
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert (error.step.number, error.step.scale) == (2, 1.0)  # At 2 it could go lower.
    assert error.origin is not None
    assert error.origin.module == "sick"
    assert str(error).splitlines()[:3] == [
        "step 2 was skipped at a loss scale of 1, the smallest one: gradients hold inf or NaN at "
        "every scale",
        "  group 0, parameter 0 [2]: 0 inf, 2 NaN",
        "inf or NaN begins in the backward of sick (Sick), in SqrtBackward0",
    ]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.step, again.origin) == (str(error), error.step, error.origin)


def test_a_warning_comes_once_until_a_step_is_taken() -> None:
    optimizer, monitor, model = watched(scale=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, monitor, model, "---+--")
    told = [str(each.message).split(":")[0] for each in caught]
    assert told.pop(0) == "FP16_Optimizer"  # that the scale is not the cause
    assert told == [
        "step 1 was skipped at a loss scale of 1, the smallest one",
        "step 5 was skipped at a loss scale of 1, the smallest one",
    ]
    assert caught[0].filename == __file__


@both_paths
@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("made", PROBES.values(), ids=PROBES.keys())
def test_the_smallest_scale_of_amp_raises(made: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = made(model.parameters())
    handle = amp.init(device_type="cpu", min_loss_scale=2.0**15)
    Monitor(optimizer, at_minimum="raise")

    def train_amp() -> None:
        for factor in (INF, INF, 1.0, 1.0):
            optimizer.zero_grad()
            with handle.scale_loss(model(torch.ones(1, 1)).sum() * factor, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    with pytest.raises(
        LossScaleExhaustedError, match="step 2 was skipped at a loss scale of 32768"
    ):
        train_amp()


@both_paths
@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("made", PROBES.values(), ids=PROBES.keys())
def test_the_smallest_scale_of_a_grad_scaler_raises(made: Any) -> None:
    weight = ones(2, dtype=torch.float32)
    optimizer, scaler = made([weight]), amp.GradScaler("cpu", init_scale=2.0, min_scale=1.0)
    monitor = Monitor(scaler, at_minimum="raise")

    def train_scaled() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(pull((weight, INF))).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(LossScaleExhaustedError, match="step 2 was skipped at a loss scale of 1,"):
        train_scaled()
    assert [step.scale for step in monitor.history.steps] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("options", "wish"),
    [
        ({"at_minimum": "stop"}, 'it must be "warn", "raise" or a function'),
        ({"at_minimum": None}, 'it must be "warn", "raise" or a function'),
        (
            {"after": 2},
            "after is 2, but there is no model to look into; give it: Monitor",
        ),
        ({"after": 0, "model": nn.Linear(1, 1)}, "at least 1"),
    ],
)
def test_a_policy_that_there_is_not_is_refused(options: Any, wish: str) -> None:
    with pytest.raises(ValueError, match=wish):
        Monitor(**options)


@both_paths
@pytest.mark.usefixtures("paths")
def test_skips_that_go_on_are_looked_into_once() -> None:
    optimizer, monitor, model = watched(scale=2.0**16, after=1)
    train(optimizer, monitor, model, "---+--")
    assert [*monitor.history.origins] == [1, 5]

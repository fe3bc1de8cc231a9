"""A Monitor keeps what became of the steps of every kind of loop, and shows it."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cases import INF, PROBES, ones, pull, wrap

import apex_mp
from apex_mp import amp
from apex_mp.monitor import History, Monitor, Step
from apex_mp.optimizers import FusedAdam, FusedLAMB
from apex_mp.scale import device_scale
from apex_mp.step import step_log

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


SOURCES: dict[str, tuple[Any, str]] = {
    "none": (lambda: None, r"call monitor\.record\(\) after each step"),
    "scaler": (
        lambda: amp.GradScaler("cpu"),
        r"the GradScaler has not been used for scaler\.step\(optimizer\)",
    ),
    "FP16_Optimizer": (
        lambda: wrap(torch.optim.SGD([ones(1)], lr=0.1)),
        "the FP16_Optimizer has not been stepped",
    ),
    "plain optimizer": (
        lambda: torch.optim.SGD([ones(1)], lr=0.1),
        r"of steps of SGD it hears only if the loss goes through scale_loss\. With a GradScaler "
        r"give the Monitor that: Monitor\(scaler\)\..*Monitor\(\), and call monitor\.record\(\)",
    ),
}


probes = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES.keys())


@pytest.fixture(autouse=True)
def nobody_listens() -> Any:
    yield
    gc.collect()
    step_log.listeners.clear()


def seen(monitor: Monitor) -> list[tuple[float, bool]]:
    return [(step.scale, step.skipped) for step in monitor.history.steps]


def two_steps(optimizer: Any, weight: Any) -> None:
    """One that is skipped, and one whose gradient is (3, 4)."""
    for grad in ((INF, 1.0), (3.0, 4.0)):
        optimizer.zero_grad()
        optimizer.backward(pull((weight, torch.tensor(grad))))
        optimizer.step()


# FP16_Optimizer.


@probes
def test_steps_of_an_fp16_optimizer_are_kept(probe: Any) -> None:
    weight = ones(2)
    optimizer = wrap(probe([weight]), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8})
    monitor = Monitor(optimizer)
    two_steps(optimizer, weight)
    skipped, taken = monitor.history.steps
    assert (skipped.number, skipped.scale, skipped.skipped) == (1, 8.0, True)
    assert [(found.inf, found.nan) for found in skipped.overflow] == [(1, 0)]
    assert skipped.grad_norm is None
    assert taken == Step(2, 4.0, False, grad_norm=5.0)


@probes
def test_clip_master_grads_is_kept_with_the_norm_from_before_it(probe: Any) -> None:
    weight = ones(2)
    optimizer = wrap(probe([weight]))
    monitor = Monitor(optimizer)
    optimizer.backward(pull((weight, torch.tensor([3.0, 4.0]))))
    optimizer.clip_master_grads(1.0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(pull((weight, torch.tensor([3.0, 4.0]))))
    optimizer.step()
    first, second = monitor.history.steps
    assert first.grad_norm == 5.0
    assert first.clip == pytest.approx(0.2, rel=1e-5)
    assert (second.grad_norm, second.clip) == (5.0, None)


@probes
def test_what_a_device_reports_later_comes_in_order(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_scale, "DEVICE_TYPES", {"cpu"})
    weight = ones(2)
    optimizer = wrap(
        probe([weight]), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0}
    )
    monitor = Monitor(optimizer)
    monitor.note(grad_norm=torch.tensor(7.0))  # Of the step that is skipped.
    two_steps(optimizer, weight)
    monitor.note(grad_norm=torch.tensor(9.0))
    optimizer.backward(pull((weight, torch.tensor([3.0, 4.0]))))
    optimizer.step()
    steps = [*monitor.history.steps]
    assert [(step.scale, step.skipped) for step in steps] == [(8, True), (4, False), (4, False)]
    assert [step.grad_norm for step in steps] == [None, 5.0, 9.0]
    assert [found.name for found in steps[0].overflow] == ["group 0, parameter 0"]


# amp.


def amp_steps(optimizer: Any, model: Any, block: Any, factors: Any = (1.0, INF, 1.0)) -> None:
    for factor in factors:
        optimizer.zero_grad()
        with block(model(torch.ones(1, 1)).sum() * factor) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


EXPECTED = [(8.0, False), (8.0, True), (4.0, False)]


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("made", [torch.optim.SGD, FusedAdam])
@pytest.mark.parametrize("listens_to", ["optimizer", "handle"])
def test_steps_of_amp_are_kept(
    made: Any, listens_to: str, device_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_path:
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {"cpu"})
    model = torch.nn.Linear(1, 1)
    optimizer = made(model.parameters(), lr=0.1)
    handle = amp.init(device_type="cpu")
    handle._default_scaler._loss_scale = 8.0  # type: ignore[union-attr]
    monitor = Monitor(optimizer if listens_to == "optimizer" else handle)
    amp_steps(optimizer, model, lambda loss: handle.scale_loss(loss, optimizer))
    assert seen(monitor) == EXPECTED
    assert {found.name for found in monitor.history.steps[1].overflow} == {"weight", "bias"}


def test_steps_of_amp_initialize_are_kept() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    monitor = Monitor(optimizer)
    amp_steps(optimizer, model, lambda loss: amp.scale_loss(loss, optimizer))
    assert seen(monitor) == EXPECTED


def test_two_optimizers_of_one_handle_are_heard_apart_or_together() -> None:
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    handle = amp.init(device_type="cpu", loss_scale=8.0)
    first, both = Monitor(optimizers[0]), Monitor(handle)
    for model, optimizer, factor in zip(models, optimizers, (1.0, INF), strict=True):
        amp_steps(optimizer, model, lambda loss, o=optimizer: handle.scale_loss(loss, o), [factor])
    assert seen(first) == [(8.0, False)]
    assert seen(both) == [(8.0, False), (8.0, True)]


# GradScaler.


GRAD_SCALER_OPTIMIZERS = {
    "fused": lambda params: FusedAdam(params),
    "torch's fused": lambda params: torch.optim.Adam(params, fused=True),
    "plain": lambda params: torch.optim.Adam(params),
}


def scaled_steps(
    scaler: amp.GradScaler, optimizer: Any, weight: Any, clip: str | None = None
) -> None:
    """One that is skipped, and one whose gradient is (3, 4)."""
    for grad in ((INF, 1.0), (3.0, 4.0)):
        optimizer.zero_grad()
        scaler.scale(pull((weight, torch.tensor(grad)))).backward()
        if clip == "unscaled":
            scaler.unscale_(optimizer)
        if clip is not None:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("made", GRAD_SCALER_OPTIMIZERS.values(), ids=GRAD_SCALER_OPTIMIZERS)
@pytest.mark.parametrize("listens_to", ["scaler", "optimizer"])
@pytest.mark.parametrize("clip", [None, "scaled", "unscaled"])
def test_steps_of_a_grad_scaler_are_kept(
    made: Any,
    listens_to: str,
    clip: str | None,
    device_path: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device_path:
        monkeypatch.setattr(device_scale, "DEVICE_TYPES", {"cpu"})
    weight = ones(2, dtype=torch.float32)
    scaler, optimizer = amp.GradScaler("cpu", init_scale=8.0), made([weight])
    monitor = Monitor(scaler if listens_to == "scaler" else optimizer)
    scaled_steps(scaler, optimizer, weight, clip)
    skipped, taken = monitor.history.steps
    assert (skipped.scale, skipped.skipped, skipped.grad_norm) == (8.0, True, None)
    assert skipped.clip is None
    assert [found.name for found in skipped.overflow] == ["group 0, parameter 0"]
    assert (taken.scale, taken.skipped) == (4.0, False)
    # A plain optimizer under torch's rule measures no norm unless it is asked to clip.
    is_measured = clip is not None or made is not GRAD_SCALER_OPTIMIZERS["plain"]
    assert taken.grad_norm == (pytest.approx(5.0, rel=1e-6) if is_measured else None)
    assert taken.clip == (None if clip is None else pytest.approx(0.2, rel=1e-5))


def test_two_optimizers_of_one_grad_scaler_are_heard_apart_or_together() -> None:
    weights = ones(2), ones(2)
    scaler = amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [FusedAdam([weight], master_weights=True) for weight in weights]
    first, both = Monitor(optimizers[0]), Monitor(scaler)
    scaler.scale(pull((weights[0], 1.0), (weights[1], INF))).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert seen(first) == [(8.0, False)]
    assert seen(both) == [(8.0, False), (8.0, True)]


# A step that raises.


def _of_fp16_optimizer(weight: Any) -> tuple[Any, Any, Any]:
    sgd = torch.optim.SGD([weight], lr=0.25)
    optimizer = wrap(sgd, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8})

    def step(factor: float) -> None:
        optimizer.zero_grad()
        optimizer.backward(pull((weight, factor)))
        optimizer.clip_master_grads(1.0)
        optimizer.step()

    return optimizer, optimizer.optimizer, step


def _of_grad_scaler(weight: Any) -> tuple[Any, Any, Any]:
    scaler = amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD([weight], lr=0.25)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(pull((weight, factor))).backward()
        try:
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
        finally:
            scaler.update()

    return scaler, optimizer, step


def _of_amp(weight: Any) -> tuple[Any, Any, Any]:
    handle = amp.init(device_type="cpu", verbose=False)
    optimizer = torch.optim.SGD([weight], lr=0.25)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        with handle.scale_loss(pull((weight, factor)), optimizer) as loss:
            loss.backward()
        monitor.note(grad_norm=factor)
        optimizer.step()

    monitor = Monitor(optimizer)
    return monitor, optimizer, step


@pytest.mark.filterwarnings("ignore:GradScaler.*no float32 masters:RuntimeWarning")
@pytest.mark.parametrize("made", [_of_fp16_optimizer, _of_grad_scaler, _of_amp])
def test_a_step_that_raises_does_not_shift_those_after_it(made: Any) -> None:
    weight = ones(1, dtype=torch.float32) if made is _of_amp else ones(1)
    source, inner, step = made(weight)
    monitor = source if isinstance(source, Monitor) else Monitor(source)
    monitor.run = lambda: torch.zeros(())
    step(2.0)
    inner.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        step(3.0)
    inner.param_groups[0]["lr"] = 0.25
    for factor in (4.0, 5.0):
        step(factor)
    assert [each.grad_norm for each in monitor.history.steps] == pytest.approx([2.0, 4.0, 5.0])
    assert not monitor._measured
    assert not monitor._runs


# What a Monitor leaves alone.


def test_a_monitor_keeps_no_optimizer_and_no_gradient_alive() -> None:
    weight = ones(2)
    optimizer = wrap(PROBES["plain"]([weight]))
    monitor = Monitor(optimizer)
    two_steps(optimizer, weight)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert len(seen(monitor)) == 2


@pytest.mark.parametrize("source", [torch.nn.Linear(1, 1), 3, "optimizer"])
def test_what_takes_no_steps_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match="it must be an FP16_Optimizer, a GradScaler"):
        Monitor(source)


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))


def test_a_callback_and_a_writer_get_each_step() -> None:
    writer, steps = Writer(), []
    monitor = Monitor(callback=steps.append, writer=writer, tag="g")
    monitor.record(scale=4.0, grad_norm=2.0)
    monitor.record(scale=4.0, skipped=True)
    assert steps == [*monitor.history.steps]
    assert writer.scalars == [
        ("g/loss_scale", 4.0, 1),
        ("g/skipped", 0.0, 1),
        ("g/grad_norm", 2.0, 1),
        ("g/loss_scale", 4.0, 2),
        ("g/skipped", 1.0, 2),
    ]


def watched_run() -> Monitor:
    weight = ones(2)
    optimizer = wrap(
        PROBES["fused"]([weight], max_grad_norm=1.0),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2**12},
    )
    monitor = Monitor(optimizer)
    for _ in range(10):
        two_steps(optimizer, weight)
    return monitor


def test_a_ring_keeps_the_last_steps_and_counts_all() -> None:
    monitor = Monitor(length=3)
    for number in range(5):
        monitor.record(skipped=number in (0, 3, 4))
    history = monitor.history
    assert [step.number for step in history.steps] == [3, 4, 5]
    assert (history.total, history.skipped, history.skips_in_a_row) == (5, 3, 2)
    assert "5, 3 skipped (60 %), the last 2 in a row; what follows is of the last 3" in (
        monitor.report()
    )


def test_the_report_says_what_happened() -> None:
    everything = Monitor()
    everything.record(skipped=True)
    assert everything.report().startswith("steps           1, 1 skipped (100 %), the last 1 in")
    assert watched_run().report().splitlines() == [
        "steps           20, 10 skipped (50 %)",
        "loss scale      2^2 at step 20, from 2^2 to 2^12",
        "gradient norm   5 at step 20, median 5, largest 5 at step 20",
        "clipped         100 % of these steps, smallest factor 0.2",
        "skipped steps in which a parameter's gradient held inf or NaN:",
        "      10  group 0, parameter 0",
    ]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    monitor = watched_run()
    monitor.history.origins[3] = "a layer"
    monitor.save(tmp_path / "run.json")
    json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    loaded = History.load(tmp_path / "run.json")
    assert loaded.steps == monitor.history.steps
    assert {**vars(loaded), "steps": None} == {**vars(monitor.history), "steps": None}


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    watched_run().plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"
    monitor = Monitor()
    with pytest.raises(ValueError, match="no steps yet"):
        monitor.plot(tmp_path / "none.png")
    monitor.record()  # Nothing measured, nothing skipped.
    monitor.plot(tmp_path / "plain.svg")
    assert "not measured" in (tmp_path / "plain.svg").read_text()


def run_report(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    # In the folder of the sources Python would find these before the package that is installed.
    words = [sys.executable, "-m", "apex_mp", "report", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_prints_the_report_and_draws_the_picture(tmp_path: Path) -> None:
    monitor = watched_run()
    monitor.save(tmp_path / "run.json")
    done = run_report(tmp_path, "run.json", "--plot", "run.png")
    assert (done.stdout, done.returncode) == (f"{monitor.report()}\n", 0)
    assert (tmp_path / "run.png").exists()
    done = run_report(tmp_path, "none.json")
    assert done.returncode == 1
    assert done.stderr.startswith("python -m apex_mp report: ")
    assert "none.json" in done.stderr


def test_a_norm_on_its_way_to_the_host_is_that_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_scale, "DEVICE_TYPES", {"cpu"})
    monitor = Monitor(wrap(torch.optim.SGD([ones(2)], lr=1.0)))
    for norm in (7.0, 9.0):  # As of a loop of the user's own.
        monitor.note(grad_norm=torch.tensor(norm))
        monitor.after_step(step_log.StepNote(skipped=False, scale=8.0))
    assert [step.grad_norm for step in monitor.history.steps] == [7.0, 9.0]


def test_a_progress_bar_gets_scale_and_skips() -> None:
    monitor = Monitor()
    assert monitor.postfix() == {"scale": "?", "skips": "0"}
    monitor.record(scale=2.0**16, skipped=True)
    assert monitor.postfix() == {"scale": "2^16", "skips": "1"}
    monitor.record(scale=100.0)
    assert monitor.postfix() == {"scale": "100", "skips": "1"}


@pytest.mark.parametrize(("make", "wish"), SOURCES.values(), ids=[*SOURCES])
def test_without_a_step_the_report_says_what_steps_are_heard_of(make: Any, wish: str) -> None:
    source = make()
    assert re.match("no steps yet: " + wish, Monitor(source).report())


@pytest.mark.parametrize(
    ("fused", "clip", "factor"),
    [(FusedAdam, "group", 1 / 8), (FusedAdam, "global", 1 / 10), (FusedLAMB, "group", 1 / 10)],
)
def test_the_smallest_factor_of_all_groups_is_kept(
    fused: type[FusedAdam | FusedLAMB], clip: str, factor: float
) -> None:
    weights = ones(1), ones(1), ones(1)
    groups = [{"params": [each]} for each in weights[:2]]
    groups.append({"params": [weights[2]], "max_grad_norm": 0.0})
    optimizer = wrap(fused(groups, max_grad_norm=1.0), clip=clip)
    monitor = Monitor(optimizer)
    optimizer.backward(pull((weights[0], 6.0), (weights[1], 8.0), (weights[2], 0.0)))
    optimizer.step()
    (step,) = monitor.history.steps
    assert step.grad_norm == 10.0
    assert step.clip == pytest.approx(factor, rel=1e-5)


def test_a_notebook_shows_a_monitor_and_its_picture() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    scaler = amp.GradScaler("cpu", init_scale=8.0)
    monitor = apex_mp.monitor.Monitor(scaler)
    assert repr(monitor) == "Monitor(0 steps, 0 skipped)"
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler.scale(param.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert repr(monitor) == "Monitor(1 steps, 1 skipped)"
    assert repr(scaler).startswith("GradScaler('cpu', scale=4.0, growth_factor=2.0, ")
    assert repr(amp.GradScaler("cpu", enabled=False)) == "GradScaler(enabled=False)"
    figure = monitor.plot()
    assert isinstance(figure, figures.Figure)
    assert figure.get_suptitle() == "1 of 1 steps were skipped (100 %)"
    with pytest.raises(TypeError, match="device is a Linear; it must be"):
        amp.GradScaler(torch.nn.Linear(1, 1))  # type: ignore[arg-type]

"""examples/imagenet: the published command lines train, and a run goes on where it was saved."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import apex_mp

pytest_plugins = ["imagenet_cases"]
pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "examples" / "imagenet"
TORCHVISION = Path(sys.prefix) / "torchvision"  # tests/trainers/test_timm.py says why it is there.
LAUNCH = "-m torch.distributed.launch --nproc_per_node=2"
HALF = "FP16_Optimizer,"
O1 = "amp.initialize, opt_level O1,"
PUBLISHED = {
    "main_amp.py DIR": f"{O1} loss scale dynamic",
    "CUDA_VISIBLE_DEVICES=1 main_amp.py DIR": f"{O1} loss scale dynamic",
    "main_amp.py --static-loss-scale 128.0 DIR": f"{HALF} static loss scale 128.0",
    f"{LAUNCH} main_amp.py --loss-scale 128.0 DIR": f"{O1} loss scale 128.0",
    f"{LAUNCH} main_amp.py --dynamic-loss-scale DIR": f"{HALF} dynamic loss scale",
    "main_fp16_optimizer.py --fp16 DIR": f"{HALF} static loss scale 1.0",
    "main_fp16_optimizer.py --fp16 --static-loss-scale 128.0 DIR": (
        f"{HALF} static loss scale 128.0"
    ),
    "main_fp16_optimizer.py --fp16 --dynamic-loss-scale DIR": f"{HALF} dynamic loss scale",
    f"{LAUNCH} main_fp16_optimizer.py --fp16 --dynamic-loss-scale DIR": (
        f"{HALF} dynamic loss scale"
    ),
    "main_amp.py --fp16 --static-loss-scale 128.0 DIR": f"{HALF} static loss scale 128.0",
    "main_amp.py --opt-level O1 --loss-scale 128.0 --sync_bn DIR": f"{O1} loss scale 128.0",
}
WAYS = {
    "O1": "main_amp --opt-level O1",
    "O2": "main_amp --opt-level O2",
    "dynamic": "main_fp16_optimizer --dynamic-loss-scale",
    "float32": "main_fp16_optimizer",
}


def rows_of(output: str) -> list[dict[str, float]]:
    """The table that a run has printed."""
    lines = [line.strip("| ").split("|") for line in output.splitlines() if line[:1] == "|"]
    names = [name.strip() for name in lines[0]]
    return [dict(zip(names, map(float, line), strict=True)) for line in lines[2:]]


def has_fallen(rows: list[dict[str, float]]) -> bool:
    return rows[-1]["train loss"] < 0.95 * rows[0]["train loss"]


def start(arguments: list[str], folder: Path, **variables: str) -> tuple[str, str]:
    """Run Python in a process; return what it printed, and what it logged from the first line."""
    root = str(Path(apex_mp.__file__).resolve().parent.parent)
    ended = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": root, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    # The launcher says first, in indented lines and stars, that it is deprecated.
    first = next(line for line in lines if line.startswith(("amp.", "FP16", "float32")))
    return ended.stdout, first


@pytest.mark.parametrize(("line", "api"), PUBLISHED.items())
def test_a_published_command_line_lowers_the_loss_and_says_first_which_api_runs(
    line: str,
    api: str,
    scripts: SimpleNamespace,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = line.replace("DIR", str(folder)).split()
    if line.startswith("main_"):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", words)
        caplog.set_level("INFO")
        # As in a process of its own, where messages go to stderr.
        monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(), caplog.handler])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(SCRIPTS / words[0]), run_name="__main__")
        output, first = printed.getvalue(), caplog.messages[0]
    else:
        variables = dict(word.split("=") for word in words if word.startswith("CUDA"))
        words = [str(SCRIPTS / word) if word.endswith(".py") else word for word in words]
        output, first = start(words[len(variables) :], tmp_path, **variables)
    rows = rows_of(output)
    assert first == api
    assert output.startswith(f"{api}; resnet8 on cpu, {1 + (LAUNCH in line)} process")
    assert has_fallen(rows), output
    # The counts of all processes, with the statistics of the first, which has saved.
    script, *flags = words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]
    monkeypatch.chdir(tmp_path)
    main = getattr(scripts, Path(script).stem).main
    (evaluated,) = main([*flags, "--evaluate", "--resume=checkpoint.pth.tar"])
    for name in ("val loss", "val top-1", "val top-5"):
        assert evaluated[name] == pytest.approx(
            rows[-1][name], abs=2e-3 if name == "val loss" else 0.1
        )


def test_without_a_folder_the_digits_are_learnt(scripts: SimpleNamespace, tmp_path: Path) -> None:
    flags = ["--opt-level=O0", "--epochs=3", "--device=cpu", f"--save={tmp_path}"]
    rows = scripts.main_amp.main(flags)
    assert rows[-1]["val top-1"] > 95
    assert rows[-1]["val top-5"] > rows[-1]["val top-1"]
    assert all(row["images/s"] > 0 for row in rows)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    way: str, run: Callable[..., Any], scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(way, "--epochs 3", "whole")
    steps = []

    def stop(*arguments: Any) -> Any:
        steps.append(arguments)
        if len(steps) == 14:  # Of ten in an epoch, seven in training.
            raise KeyboardInterrupt
        return tally(*arguments)

    tally = scripts.common.tally
    with monkeypatch.context() as patch:
        patch.setattr(scripts.common, "tally", stop)
        with pytest.raises(KeyboardInterrupt):
            run(way, "--epochs 3", "stopped")
    saved = torch.load("stopped/checkpoint.pth.tar", weights_only=True)
    assert len(saved["rows"]) == 1
    assert ("amp" in saved) == way.startswith("main_amp")
    torch.rand(7)  # The state of the generator is another one.
    resumed = run(way, "--epochs 3 --resume stopped/checkpoint.pth.tar", "stopped")
    for name in whole[-1].keys() - {"images/s"}:
        assert [row[name] for row in resumed] == [row[name] for row in whole], name
    assert_same_bits("whole/checkpoint.pth.tar", "stopped/checkpoint.pth.tar")


def assert_same_bits(*paths: str) -> None:
    one, other = (torch.load(path, weights_only=True) for path in paths)
    for state in (one, other):
        for row in state["rows"]:
            del row["images/s"]
    assert one.pop("run") == other.pop("run")
    torch.testing.assert_close(other, one, rtol=0, atol=0)
    for name, value in one["model"].items():
        assert torch.equal(value, other["model"][name]), name


def test_a_model_of_torchvision_trains_if_it_is_installed(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TORCHVISION))
    if not torch.version.cuda:  # Its operators are compiled for CUDA, and do not load here.
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # They were declared before.
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", schema)
    run("main_amp", "-a resnet18 --opt-level O0 --epochs 1")
    state = torch.load("saved/checkpoint.pth.tar", weights_only=True)
    assert state["model"]["fc.weight"].shape == (10, 512)
    with pytest.raises(SystemExit, match=r"-a is resnet19; it must be resnet8 or .* resnet18"):
        run("main_amp", "-a resnet19")

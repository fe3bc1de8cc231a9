"""examples/imagenet: the published command lines train, and a run goes on where it was saved."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import apex_mp
from apex_mp.parallel import SyncBatchNorm

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "examples" / "imagenet"
MODULES = ("common", "training", "main_amp", "main_fp16_optimizer", "compare")
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
FLAGS = (
    "-a --epochs -b -j --lr --momentum --wd --resume --evaluate --prof --deterministic --sync-bn "
    "--opt-level --keep-batchnorm-fp32 --loss-scale --fp16 --static-loss-scale "
    "--dynamic-loss-scale --local-rank --device"
)
WAYS = {
    "O1": "main_amp --opt-level O1",
    "O2": "main_amp --opt-level O2",
    "dynamic": "main_fp16_optimizer --dynamic-loss-scale",
    "float32": "main_fp16_optimizer",
}


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the recipe, which are forgotten afterwards: their names are common."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 digits as an image folder."""
    made = tmp_path_factory.mktemp("digits")
    runpy.run_path(str(SCRIPTS / "common.py"))["write_digits"](made, 160)
    return made


@pytest.fixture
def run(
    scripts: SimpleNamespace, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Train in this process, saving to a folder; return the rows of the table."""
    monkeypatch.chdir(tmp_path)

    def call(way: str, flags: str = "", save: str = "saved") -> Any:
        module, *given = shlex.split(f"{way} {flags} --device cpu --save {save}")
        return getattr(scripts, module).main([*given, str(folder)])

    return call


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
    assert (tmp_path / "checkpoint.pth.tar").is_file()


def test_without_a_folder_the_digits_are_learnt(scripts: SimpleNamespace, tmp_path: Path) -> None:
    flags = ["--opt-level=O0", "--epochs=3", "--device=cpu", f"--save={tmp_path}"]
    rows = scripts.main_amp.main(flags)
    assert rows[-1]["val top-1"] > 95
    assert rows[-1]["val top-5"] > rows[-1]["val top-1"]
    assert all(row["images/s"] > 0 for row in rows)


def test_a_learning_rate_of_zero_does_not_lower_the_loss(run: Callable[..., Any]) -> None:
    assert not has_fallen(run("main_amp", "--lr 0 --opt-level O0"))


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


def test_the_bits_do_not_depend_on_the_processes_that_load_images(run: Callable[..., Any]) -> None:
    run("main_amp", "--opt-level O0 --epochs 2 -j 0", "none")
    run("main_amp", "--opt-level O0 --epochs 2 -j 2", "two")
    assert_same_bits("none/checkpoint.pth.tar", "two/checkpoint.pth.tar")


def test_another_seed_and_another_epoch_have_other_crops(
    scripts: SimpleNamespace, folder: Path
) -> None:
    def crops(seed: int, epoch: int) -> torch.Tensor:
        args = argparse.Namespace(seed=seed, size=8, min_area=0.08, flip=0.5)
        images = scripts.common.Folder(folder / "train", args, crops=True)
        images.epoch = epoch
        return torch.stack([image for image, _ in images])

    assert torch.equal(crops(0, 0), crops(0, 0))
    assert not torch.equal(crops(0, 0), crops(0, 1))
    assert not torch.equal(crops(0, 0), crops(1, 0))


def test_evaluate_gives_the_figures_of_the_epoch_that_was_saved(run: Callable[..., Any]) -> None:
    (row,) = run("main_fp16_optimizer", "--fp16 --epochs 1")
    before = Path("saved/checkpoint.pth.tar").read_bytes()
    flags = "--evaluate --resume saved/checkpoint.pth.tar"
    (evaluated,) = run("main_fp16_optimizer", f"--fp16 {flags}")
    assert evaluated == {name: row[name] for name in evaluated}
    assert {*evaluated} >= {"val loss", "val top-1", "val top-5"}
    (in_float32,) = run("main_fp16_optimizer", flags)
    assert in_float32["val loss"] == pytest.approx(row["val loss"], rel=1e-2)
    assert Path("saved/checkpoint.pth.tar").read_bytes() == before


def test_profiling_prints_the_operators_of_n_iterations_and_saves_nothing(
    run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run("main_amp", "--prof 2 --opt-level O0")
    lines = capsys.readouterr().out.splitlines()
    calls = {line.split()[0]: line.split()[-1] for line in lines if len(line.split()) > 1}
    assert calls["Optimizer.step#FusedSGD.step"] == "2"
    assert calls["aten::convolution_backward"] == str(2 * 9)  # resnet8 has nine.
    assert not Path("saved").exists()


def test_sync_bn_puts_synchronised_batch_norms_into_the_model(
    run: Callable[..., Any], scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.training, "fit", lambda args, training, *_: training.model)
    for way, flag in (("main_amp", ""), ("main_fp16_optimizer --fp16", "")):
        plain, synchronised = run(way, flag), run(way, "--sync_bn")
        for model, kind in ((plain, nn.BatchNorm2d), (synchronised, SyncBatchNorm)):
            norms = [each for each in model.modules() if "BatchNorm" in type(each).__name__]
            assert len(norms) == 9
            assert {type(norm) for norm in norms} == {kind}


def test_flags_may_have_hyphens_or_underscores(scripts: SimpleNamespace) -> None:
    flags = ["--opt-level=O2", "--keep-batchnorm-fp32", "False", "--loss-scale", "dynamic"]
    flags += ["--local-rank=1", "--sync-bn", "--batch-size=4", "--min-area=0.5", "a_b/c-d"]
    other = [each.replace("-", "_").replace("__", "--") for each in flags[:-1]] + flags[-1:]
    assert scripts.training.parse_args("", other) == scripts.training.parse_args("", flags)
    assert scripts.training.parse_args("", flags).local_rank == 1


def test_help_explains_every_flag(
    scripts: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for main in (scripts.main_amp, scripts.main_fp16_optimizer):
        with pytest.raises(SystemExit):
            main.main(["--help"])
        shown = capsys.readouterr().out
        assert "the first line of the log says which API runs" in " ".join(shown.split())
        options = re.split(r"\n  (?=-)", shown)[1:]
        unexplained = [each for each in options if len(re.split(r"\n *|  +", each.strip())) < 2]
        assert unexplained == []
        missing = [flag for flag in FLAGS.split() if f"\n  {flag}" not in shown]
        assert missing == []


def test_the_learning_rate_warms_up_for_five_epochs_and_falls_at_30_60_and_80(
    scripts: SimpleNamespace,
) -> None:
    args = argparse.Namespace(lr=0.1, batch_size=64, world=8)
    epochs = [0.5, 2.5, 5, 29.5, 30, 30.5, 60, 60.5, 80, 80.5]
    rates = [0.02, 0.1, 0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002, 0.0002]
    for epoch, rate in zip(epochs, rates, strict=True):
        assert scripts.training.learning_rate(args, epoch) == pytest.approx(rate), epoch


def test_top_1_and_top_5_count_what_is_among_the_highest_scores(scripts: SimpleNamespace) -> None:
    output, target = torch.randn(50, 10), torch.randint(10, (50,))
    ranks = [int((row > row[label]).sum()) for row, label in zip(output, target, strict=True)]
    sums = scripts.common.tally(output, torch.tensor(2.5), target)
    assert sums.tolist() == [125, ranks.count(0), sum(rank < 5 for rank in ranks), 50]
    loss, top1, top5, count = scripts.common.means(sums)
    assert (loss, top1, top5, count) == (2.5, 2.0 * ranks.count(0), 2.0 * sums[2].item(), 50)


def test_processes_validate_each_image_once(scripts: SimpleNamespace, folder: Path) -> None:
    seen: list[torch.Tensor] = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    model.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0]))
    args = argparse.Namespace(
        size=8, batch_size=7, workers=0, device="cpu", seed=0, world=1, rank=0
    )
    val = scripts.common.Folder(folder / "val", args, crops=False)
    scripts.common.validate(args, model, val)
    alone = torch.stack(seen)
    seen.clear()
    for rank in range(3):
        shared = argparse.Namespace(**{**vars(args), "world": 3, "rank": rank})
        scripts.common.validate(shared, model, val)
    assert len(seen) == len(alone) == len(val)
    assert torch.equal(torch.stack(seen).flatten(1).sum(1).sort()[0],
                       alone.flatten(1).sum(1).sort()[0])  # fmt: skip


def test_the_prefetcher_yields_every_batch_in_order_and_normalized(
    scripts: SimpleNamespace,
) -> None:
    pixels = torch.randint(256, (10, 3, 4, 4), dtype=torch.uint8)
    pairs = [(image, number) for number, image in enumerate(pixels)]
    got = [*scripts.common.Prefetcher(DataLoader(pairs, batch_size=4), "cpu")]
    assert [len(target) for _, target in got] == [4, 4, 2]
    assert torch.cat([target for _, target in got]).tolist() == [*range(10)]
    mean, std = (
        torch.tensor(each).view(3, 1, 1) for each in (scripts.common.MEAN, scripts.common.STD)
    )
    torch.testing.assert_close(torch.cat([batch for batch, _ in got]), (pixels / 255 - mean) / std)


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


def test_without_torchvision_its_models_are_refused_with_the_command_that_helps(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit, match=r"-a resnet50: .* pip install torchvision"):
        run("main_amp", "-a resnet50")
    assert not Path("saved").exists()


@pytest.mark.parametrize("way", ["--fp16", "--static-loss-scale 128", "--dynamic-loss-scale"])
@pytest.mark.parametrize("flag", ["--opt-level O1", "--loss-scale 8", "--keep-batchnorm-fp32 True"])
def test_flags_of_both_apis_are_refused_together(
    way: str, flag: str, run: Callable[..., Any]
) -> None:
    name, value = flag.split()
    for main in ("main_amp", "main_fp16_optimizer"):
        with pytest.raises(SystemExit, match=f"{name} is {value}; it is for amp.initialize"):
            run(main, f"{way} {flag}")


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ("train", "train: there are no images .* DIR must be a folder with train/CLASS/NAME.jpg"),
        ("val", "val: there are no images"),
        ("val/7", "only one of train/ and val/ has images of 7; both must"),
    ],
)
def test_a_folder_without_images_is_refused_and_nothing_is_written(
    bad: str, sentence: str, scripts: SimpleNamespace, tmp_path: Path
) -> None:
    scripts.common.write_digits(tmp_path / "data", 100)
    (tmp_path / "data" / bad).rename(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match=sentence):
        scripts.main_amp.main([str(tmp_path / "data"), f"--save={tmp_path}/saved"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "elsewhere"]


def test_a_file_that_is_no_image_is_named(scripts: SimpleNamespace, tmp_path: Path) -> None:
    scripts.common.write_digits(tmp_path / "data", 100)
    (tmp_path / "data/val/3/bad.png").write_text("no image")
    with pytest.raises(ValueError, match=r"val/3/bad.png: it is no image that can be read"):
        scripts.main_amp.main([f"{tmp_path}/data", f"--save={tmp_path}/saved", "--opt-level=O0"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("main_amp --opt-level O0", "its API is amp.initialize, opt_level O1, .* must be the same"),
        ("main_amp -a resnet18", "its -a is resnet8, and that of this run is resnet18"),
        ("main_fp16_optimizer --fp16", "its API is amp.initialize, opt_level O1"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(
    flags: str,
    sentence: str,
    run: Callable[..., Any],
    scripts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run("main_amp", "--epochs 1")
    before = Path("saved/checkpoint.pth.tar").read_bytes()
    # That of torchvision would do; this one is always there.
    monkeypatch.setattr(scripts.common, "make_model", lambda *_: nn.Linear(2, 2))
    loaded = []
    monkeypatch.setattr(nn.Linear, "load_state_dict", lambda *_: loaded.append(1), raising=False)
    with pytest.raises(SystemExit, match=f"--resume saved/checkpoint.pth.tar: {sentence}"):
        run(flags, "--resume saved/checkpoint.pth.tar")
    assert Path("saved/checkpoint.pth.tar").read_bytes() == before
    assert loaded == []


def test_a_checkpoint_of_other_classes_is_refused(
    run: Callable[..., Any], scripts: SimpleNamespace, tmp_path: Path
) -> None:
    run("main_amp", "--opt-level O0 --epochs 1")
    scripts.common.write_digits(tmp_path / "letters", 100)
    for part in ("train", "val"):
        (tmp_path / "letters" / part / "9").rename(tmp_path / "letters" / part / "nine")
    flags = ["--opt-level=O0", "--resume=saved/checkpoint.pth.tar", f"{tmp_path}/letters"]
    with pytest.raises(SystemExit, match=r"its classes is .*'9'\], and .* 'nine'\]"):
        scripts.main_amp.main(flags)


@pytest.mark.parametrize("content", [None, b"", b"text", {"epoch": 3, "state_dict": {}}])
def test_what_is_no_checkpoint_of_this_program_is_refused(
    content: Any, run: Callable[..., Any]
) -> None:
    if isinstance(content, bytes):
        Path("other.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, "other.pt")
    with pytest.raises(SystemExit, match=r"--resume other.pt: .*; it must be a checkpoint of this"):
        run("main_amp", "--opt-level O0 --resume other.pt")
    assert not Path("saved").exists()


def test_another_learning_rate_goes_on_and_is_told(
    run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    run("main_amp", "--opt-level O0 --epochs 1")
    flags = "--opt-level O0 --epochs 2 --resume saved/checkpoint.pth.tar"
    run("main_amp", f"{flags} --lr 0.2")
    told = [each for each in caplog.messages if each.startswith("--resume")]
    assert told == ["--resume: lr is 0.2, was 0.1; bits will differ"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("main_amp", "--opt-level O0 --epochs 1")
    before = Path("saved/checkpoint.pth.tar").read_bytes()

    def fail(_: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        run("main_amp", "--opt-level O0 --epochs 2 --resume saved/checkpoint.pth.tar")
    assert Path("saved/checkpoint.pth.tar").read_bytes() == before
    assert sorted(os.listdir("saved")) == ["checkpoint.pth.tar", "model_best.pth.tar"]


@pytest.mark.parametrize("flag", ["--epochs 0", "-b 0", "--prof -1", "--size x"])
def test_a_count_below_one_is_refused(
    flag: str, run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("main_amp", flag)
    assert f"'{flag.split()[1]}'; it must be a whole number, at least 1" in capsys.readouterr().err


def test_runs_are_compared_by_their_checkpoints(
    run: Callable[..., Any], scripts: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    last = run("main_amp", "--opt-level O0 --epochs 2", "one")[-1]
    run("main_fp16_optimizer", "--epochs 1", "two")
    capsys.readouterr()
    files = ["one/checkpoint.pth.tar", "two/checkpoint.pth.tar"]
    scripts.compare.main([*files, "--plot=runs.png"])
    lines = [[*map(str.strip, line.split("|"))] for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines[2:]] == [
        "amp.initialize, opt_level O0, loss scale 1", "float32"
    ]  # fmt: skip
    assert lines[2][2:5] == ["2", f"{last['train loss']:.3f}", f"{last['val loss']:.3f}"]
    assert Path("runs.png").read_bytes().startswith(b"\x89PNG")

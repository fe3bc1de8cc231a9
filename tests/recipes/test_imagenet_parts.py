"""examples/imagenet: images, the schedule, what is counted, and what bad input is told."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from apex_mp.parallel import SyncBatchNorm

pytest_plugins = ["imagenet_cases"]
pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

FLAGS = (
    "-a --epochs -b -j --lr --momentum --wd --resume --evaluate --prof --deterministic --sync-bn "
    "--opt-level --keep-batchnorm-fp32 --loss-scale --fp16 --static-loss-scale "
    "--dynamic-loss-scale --local-rank --device"
)


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


def test_sync_bn_puts_synchronised_batch_norms_into_the_model(
    run: Callable[..., Any], scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.training, "fit", lambda args, training, *_: training.model)
    for way in ("main_amp", "main_fp16_optimizer --fp16"):
        plain, synchronised = run(way, ""), run(way, "--sync_bn")
        for model, kind in ((plain, nn.BatchNorm2d), (synchronised, SyncBatchNorm)):
            norms = [each for each in model.modules() if "BatchNorm" in type(each).__name__]
            assert len(norms) == 9
            assert {type(norm) for norm in norms} == {kind}


def test_flags_may_have_hyphens_or_underscores(scripts: SimpleNamespace) -> None:
    flags = ["--opt-level=O2", "--keep-batchnorm-fp32", "False", "--loss-scale", "dynamic"]
    flags += ["--local-rank=1", "--sync-bn", "--batch-size=4", "--min-area=0.5", "a_b/c-d"]
    other = [each.replace("-", "_").replace("__", "--") for each in flags[:-1]] + flags[-1:]
    assert scripts.flags.parse_args("", other) == scripts.flags.parse_args("", flags)
    assert scripts.flags.parse_args("", flags).local_rank == 1


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
        missing = [
            flag
            for flag in FLAGS.split()
            if not re.search(rf"^  (-\S+ \S+, )?{flag}\b", shown, re.MULTILINE)
        ]
        assert missing == []


def test_each_epoch_has_its_order_and_crops_and_each_step_its_learning_rate(
    scripts: SimpleNamespace, folder: Path
) -> None:
    args = scripts.flags.parse_args("", [str(folder), "--device=cpu", "--lr=1", "-b=40"])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    rates = []

    def step(batch: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batches.append((batch, target))
        rates.append(optimizer.param_groups[0]["lr"])
        return torch.zeros(len(target), 10), torch.zeros(())

    training = scripts.training.Training("none", model, optimizer, step, lambda: 1.0)
    with scripts.common.opened(args) as (train, _):
        for epoch in (0, 1, 1):
            scripts.training.train_epoch(args, training, train, epoch)
    epochs = [batches[:3], batches[3:6], batches[6:]]
    images, labels = ([torch.cat([b[i] for b in epoch]) for epoch in epochs] for i in (0, 1))
    assert not torch.equal(labels[0], labels[1])
    assert torch.equal(labels[1], labels[2])
    assert torch.equal(images[1], images[2])
    sums = [each.flatten(1).sum(1).sort()[0] for each in images]
    assert not torch.allclose(sums[0], sums[1]), "other crops, not in another order alone"
    assert rates == pytest.approx([40 / 256 * step / 3 / 5 for step in (1, 2, 3, 4, 5, 6, 4, 5, 6)])


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
        ("train", "train: there is no such folder; DIR must be a folder with train/CLASS/NAME.jpg"),
        ("val", "val: there is no such folder"),
        ("val/*", r"val: there are no images \(.*\.jpg.*\); DIR must be"),
        ("val/7", "only one of train/ and val/ has images of 7; both must"),
    ],
)
def test_a_folder_without_images_is_refused_and_nothing_is_written(
    bad: str, sentence: str, scripts: SimpleNamespace, tmp_path: Path
) -> None:
    scripts.common.write_digits(tmp_path / "data", 100)
    for folder in list((tmp_path / "data").glob(bad)):
        shutil.rmtree(folder)
    with pytest.raises(SystemExit, match=sentence):
        scripts.main_amp.main([str(tmp_path / "data"), f"--save={tmp_path}/saved"])
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_file_that_is_no_image_is_named(scripts: SimpleNamespace, tmp_path: Path) -> None:
    scripts.common.write_digits(tmp_path / "data", 100)
    (tmp_path / "data/val/3/bad.png").write_text("no image")
    with pytest.raises(ValueError, match=r"val/3/bad.png: it is no image that can be read"):
        scripts.main_amp.main([f"{tmp_path}/data", f"--save={tmp_path}/saved", "--opt-level=O0"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("main_amp --opt-level O0", r"API is .* O0, .* was .* O1, .* it must be the same"),
        ("main_amp -a resnet18", "-a is resnet18 here, and was resnet8 there"),
        (
            "main_fp16_optimizer --fp16",
            "API is FP16_Optimizer, .* was amp.initialize, .* O1",
        ),
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
    with pytest.raises(SystemExit, match=r"classes is .* 'nine'\] here, and was .* '9'\]"):
        scripts.main_amp.main(flags)


@pytest.mark.parametrize("content", [b"", b"text", {"epoch": 3, "state_dict": {}}])
def test_what_is_no_checkpoint_of_this_program_is_refused(
    content: Any, run: Callable[..., Any]
) -> None:
    if isinstance(content, bytes):
        Path("other.pt").write_bytes(content)
    else:
        torch.save(content, "other.pt")
    with pytest.raises(SystemExit, match=r"--resume other.pt: .*; it must be a checkpoint of this"):
        run("main_amp", "--opt-level O0 --resume other.pt")
    assert not Path("saved").exists()


def test_a_gpu_that_is_not_there_is_refused(run: Callable[..., Any]) -> None:
    with pytest.raises(SystemExit, match=r"--local-rank 7: this machine has . GPUs; start one"):
        run("main_amp", "--local-rank 7 --opt-level O0 --device cuda")


def test_another_learning_rate_goes_on_and_is_told(
    run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    run("main_amp", "--opt-level O0 --epochs 1")
    flags = "--opt-level O0 --epochs 2 --resume saved/checkpoint.pth.tar"
    run("main_amp", f"{flags} --lr 0.2 --wd 0.5")
    told = [each for each in caplog.messages if each.startswith("--resume")]
    assert told == [
        "--resume: lr is 0.2, was 0.1; bits will differ",
        "--resume: weight_decay is 0.5, was 0.0001; bits will differ",
    ]
    state = torch.load("saved/checkpoint.pth.tar", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


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

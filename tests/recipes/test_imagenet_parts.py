"""examples/imagenet: images, the schedule, what is counted, and what bad input raises."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest_plugins = ["imagenet_cases"]
pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


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

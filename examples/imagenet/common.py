"""What main_amp.py and main_fp16_optimizer.py share: images, the model, and validation."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset, Subset

LAYOUT = "a folder with train/CLASS/NAME.jpg and val/CLASS/NAME.jpg"
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
# A mirrored digit is none, and a twelfth of its 64 pixels shows nothing.
CROPS = {"digits": {"min_area": 0.7, "flip": 0.0}, "folder": {"min_area": 0.08, "flip": 0.5}}
CENTER = 224 / 256  # of an image's shorter side: what validation sees
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Folder(Dataset[tuple[Tensor, int]]):
    """Images by class, as bytes of shape (3, size, size), with the number of their class.

    Args:
        folder: Holds a folder for each class.
        args: The program's flags; size, min_area, flip and seed are used.
        crops: Show random crops, as for training; otherwise the center.

    Raises:
        SystemExit: There is no folder, or no image in it.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, *, crops: bool) -> None:
        self.files = sorted(each for each in folder.glob("*/*") if each.suffix.lower() in SUFFIXES)
        if not folder.exists():
            sys.exit(f"{folder}: there is no such folder; DIR must be {LAYOUT}")
        if not self.files:
            kinds = " ".join(sorted(SUFFIXES))
            sys.exit(f"{folder}: there are no images ({kinds}); DIR must be {LAYOUT}")
        self.classes = sorted({file.parent.name for file in self.files})
        self.epoch = 0  # Decides on the crops.
        self._args, self._crops = args, crops
        self._number = {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, size = self.files[index], self._args.size
        try:
            with Image.open(file) as opened_file:
                image = opened_file.convert("RGB")
        except OSError as error:
            raise ValueError(f"{file}: it is no image that can be read ({error})") from None
        random = np.random.default_rng((self._args.seed, self.epoch, index))
        box = self._random_box(*image.size, random) if self._crops else _center_box(*image.size)
        image = image.resize((size, size), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(image).transpose(2, 0, 1)
        if self._crops and random.random() < self._args.flip:
            pixels = pixels[:, :, ::-1]
        return torch.from_numpy(pixels.copy()), self._number[file.parent.name]

    def _random_box(self, width: int, height: int, random: Any) -> tuple[float, ...]:
        """Left, top, right, bottom of a part of random area, shape and place."""
        area = width * height * random.uniform(self._args.min_area, 1.0)
        ratio = math.exp(random.uniform(-math.log(4 / 3), math.log(4 / 3)))
        w, h = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
        x, y = random.uniform(0, width - w), random.uniform(0, height - h)
        return x, y, x + w, y + h


def _center_box(width: int, height: int) -> tuple[float, ...]:
    half = CENTER * min(width, height) / 2
    return width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half


class Prefetcher:
    """Batches on the device, normalized; a GPU gets the next one while it computes this one.

    Args:
        loader: Yields bytes and labels.
        device: "cpu" or "cuda".
    """

    def __init__(self, loader: Any, device: str) -> None:
        self._loader, self._device = loader, device
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._mean, self._std = (
            255 * torch.tensor(each, device=device).view(3, 1, 1) for each in (MEAN, STD)
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = iter(self._loader)
        following = self._send(next(batches, None))
        while following is not None:
            ready = self._receive(following)
            following = self._send(next(batches, None))
            yield ready

    def _send(self, batch: Any) -> tuple[Tensor, Tensor] | None:
        if batch is None:
            return None
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            pixels, target = (each.to(self._device, non_blocking=True) for each in batch)
            return pixels.float().sub_(self._mean).div_(self._std), target

    def _receive(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self._stream:
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)
            for each in batch:  # Its memory is not to be used again before `current` is done.
                each.record_stream(current)
        return batch


def write_digits(folder: Path, count: int = 1797) -> None:
    """Write the handwritten digits of scikit-learn as an image folder; a quarter is for val."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        sys.exit(f"{error}; pip install scikit-learn, or give a folder of images")
    scans = load_digits()
    for number in range(count):
        part = "train" if number % 4 else "val"
        file = folder / part / str(scans.target[number]) / f"{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((scans.images[number] * 255 / 16).astype("uint8")).save(file)


@contextlib.contextmanager
def opened(args: argparse.Namespace) -> Iterator[tuple[Folder, Folder]]:
    """Yield the images to train on and those to validate; set the size if it is not given.

    Raises:
        SystemExit: A folder has no images, or the two have other classes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.data
        if folder is None:
            folder = Path(scratch)
            write_digits(folder)
        train = Folder(folder / "train", args, crops=True)
        val = Folder(folder / "val", args, crops=False)
        if train.classes != val.classes:
            odd = ", ".join(sorted({*train.classes} ^ {*val.classes})[:5])
            sys.exit(f"{folder}: only one of train/ and val/ has images of {odd}; both must")
        with Image.open(train.files[0]) as first:
            args.size = args.size or min(224, *first.size)
        yield train, val


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Sequential()
        if stride > 1:
            self.short.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.short.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


def make_model(arch: str, classes: int) -> nn.Module:
    """Return resnet8, that of He et al. for small images, or a model of torchvision.

    Raises:
        SystemExit: There is no such model, or no torchvision.
    """
    if arch == "resnet8":
        first = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        blocks = [Block(16, 16), Block(16, 32), Block(32, 64)]
        last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)]
        return nn.Sequential(*first, *blocks, *last)
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch.
        sys.exit(f"-a {arch}: {error}; pip install torchvision, or give -a resnet8")
    if arch not in models.list_models(models):
        known = ", ".join(name for name in models.list_models(models) if "resnet" in name)
        sys.exit(f"-a is {arch}; it must be resnet8 or a model of torchvision, such as {known}")
    return models.get_model(arch, num_classes=classes)


def tally(output: Tensor, loss: Tensor, target: Tensor) -> Tensor:
    """Sum over a batch: loss, right at the first guess, right among five, and images."""
    hits = output.topk(min(5, output.size(1))).indices == target[:, None]
    count = torch.full((), len(target), device=target.device)
    return torch.stack([loss.detach() * count, hits[:, 0].sum(), hits.sum(), count]).double()


def means(sums: Tensor) -> tuple[float, float, float, float]:
    """Loss, top-1 and top-5 in percent, and images, of all processes."""
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, top1, top5, count = sums.tolist()
    return loss / count, 100 * top1 / count, 100 * top5 / count, count


@torch.no_grad()
def validate(args: argparse.Namespace, model: nn.Module, val: Folder) -> dict[str, float]:
    """Return loss, top-1 and top-5 on all images of `val`; each process looks at its share."""
    model.eval()
    mine = Subset(val, range(args.rank, len(val), args.world))
    loader = DataLoader(
        mine, args.batch_size, num_workers=args.workers, pin_memory=args.device == "cuda"
    )
    sums = torch.zeros(4, dtype=torch.float64, device=args.device)
    for batch, target in Prefetcher(loader, args.device):
        output = model(batch).float()
        sums += tally(output, F.cross_entropy(output, target), target)
    loss, top1, top5, _ = means(sums)
    return {"val loss": loss, "val top-1": top1, "val top-5": top5}

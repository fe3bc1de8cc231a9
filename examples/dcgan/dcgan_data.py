"""Images to learn from: the digits of scikit-learn, or a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


class Digits(Dataset[Tensor]):
    """The digits of scikit-learn, enlarged, from -1 to 1; with their labels."""

    channels = 1

    def __init__(self, size: int) -> None:
        scans = load_digits()
        images = torch.from_numpy(scans.images).float()[:, None] / 8 - 1
        self.images = F.interpolate(images, size, mode="bilinear", align_corners=False)
        self.labels = torch.from_numpy(scans.target)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


class Folder(Dataset[Tensor]):
    """The images of a folder and its subfolders: resized, the middle of each, from -1 to 1."""

    channels, labels = 3, None

    def __init__(self, root: Path, size: int) -> None:
        self.size = size
        self.paths = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES)
        if not self.paths:
            wanted = " ".join(sorted(SUFFIXES))
            sys.exit(f"--dataroot {root} holds no images; it must be a folder with {wanted} files")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        image = Image.open(self.paths[index]).convert("RGB")
        side, (width, height) = min(image.size), image.size
        left, top = (width - side) // 2, (height - side) // 2
        image = image.resize((self.size,) * 2, box=(left, top, left + side, top + side))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(self.size, self.size, 3).permute(2, 0, 1) / 127.5 - 1

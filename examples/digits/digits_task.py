"""What examples/digits/digits.py learns: the network, the scans, and the order they come in."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

# Images and labels to train on, images and labels to test on.
Data: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers for images of 1 x 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 32)
        self.dense = nn.Linear(32 * 4 * 4, 64)
        self.classifier = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.relu(self.dense(x.flatten(1)))
        return self.classifier(x)


def load_data(device: str) -> Data:
    """Return 1,347 scans to train on and 450 to test on, always the same ones."""
    scans = load_digits()
    images = (scans.images / 16.0).astype("float32")[:, None]  # 16 grey levels
    parts = train_test_split(
        images, scans.target, test_size=450, random_state=0, stratify=scans.target
    )
    train_x, test_x, train_y, test_y = (torch.from_numpy(part).to(device) for part in parts)
    return train_x, train_y, test_x, test_y


def batches(count: int, args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield the indices of each step's scans; they depend on the seed alone."""
    order = torch.Generator().manual_seed(args.seed)
    for _ in range(args.epochs):
        yield from torch.randperm(count, generator=order).split(args.batch_size)[: args.max_batches]

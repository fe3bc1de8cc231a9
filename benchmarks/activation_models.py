"""BERT-base and ResNet-50 in plain torch, as published; smaller ones of the same kinds for tests.

Attention is written out, as in the scripts of 2019: scores, softmax, dropout, mean of the values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class BertShape:
    """The sizes of a BERT encoder; by default those of bert-base-uncased."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    inner: int = 3072
    vocabulary: int = 30522
    positions: int = 512
    dropout: float = 0.1


class SelfAttention(nn.Module):
    """Each position takes a mean of all values, weighted by the softmax of its scores."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], self.heads, -1)
        query, key, value = (
            layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        means = self.dropout(self.softmax(scores)) @ value
        return means.transpose(1, 2).reshape(x.shape)


class BertLayer(nn.Module):
    """Attention and two linear layers, each with dropout, a residual and a norm."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.attention = SelfAttention(shape)
        self.output = nn.Linear(shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.norm = nn.LayerNorm(shape.width, eps=1e-12)
        self.expand = nn.Linear(shape.width, shape.inner)
        self.gelu = nn.GELU()
        self.contract = nn.Linear(shape.inner, shape.width)
        self.inner_dropout = nn.Dropout(shape.dropout)
        self.inner_norm = nn.LayerNorm(shape.width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.dropout(self.output(self.attention(x))))
        inner = self.contract(self.gelu(self.expand(x)))
        return self.inner_norm(x + self.inner_dropout(inner))


class Bert(nn.Module):
    """Embeddings, layers and pooler; the sentence's vector of the first position."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width, padding_idx=0)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.segments = nn.Embedding(2, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=1e-12)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.Sequential(*(BertLayer(shape) for _ in range(shape.layers)))
        self.pooler = nn.Linear(shape.width, shape.width)
        self.tanh = nn.Tanh()

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.positions(positions) + self.segments(torch.zeros_like(ids))
        x = self.layers(self.dropout(self.norm(x)))
        return self.tanh(self.pooler(x[:, 0]))


class BertClassifier(nn.Module):
    """A BERT with dropout and one linear layer on its sentence vector."""

    def __init__(self, shape: BertShape, classes: int) -> None:
        super().__init__()
        self.bert = Bert(shape)
        self.dropout = nn.Dropout(shape.dropout)
        self.classifier = nn.Linear(shape.width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.bert(ids)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with a batch norm, around a residual."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outer, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if channels != outer:
            conv = nn.Conv2d(channels, outer, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.norm1(self.conv1(x)))
        inner = self.relu(self.norm2(self.conv2(inner)))
        return self.relu(self.norm3(self.conv3(inner)) + self.shortcut(x))


class ResNet(nn.Sequential):
    """A residual network of bottlenecks; by default ResNet-50 for 1,000 classes."""

    def __init__(
        self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
    ) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        channels = width
        for stage, depth in enumerate(depths):
            inner = width << stage
            for index in range(depth):
                stride = 2 if stage and not index else 1
                layers.append(Bottleneck(channels, inner, stride))
                channels = 4 * inner
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        super().__init__(*layers, *head)


@dataclasses.dataclass(frozen=True)
class Task:
    """A model to train: what it is called, how it is made, and what it is given."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]  # a batch of so many samples, on the CPU


def bert(name: str, shape: BertShape, tokens: int) -> Task:
    """Return the classification of sentences in six classes."""

    def inputs(batch: int) -> Tensor:
        return torch.randint(1, shape.vocabulary, (batch, tokens))

    return Task(name, lambda: BertClassifier(shape, 6), inputs)


def resnet(name: str, build: Callable[[], ResNet], size: int) -> Task:
    """Return the classification of square images."""
    return Task(name, build, lambda batch: torch.randn(batch, 3, size, size))


TASKS = (
    bert("BERT-base, 128 tokens", BertShape(), 128),
    resnet("ResNet-50, 224 x 224", ResNet, 224),
)
SMALL_BERT = BertShape(layers=2, width=32, heads=4, inner=64, vocabulary=100, positions=16)
# For --quick and for tests.
QUICK = (
    bert("small BERT, 8 tokens", SMALL_BERT, 8),
    resnet("small ResNet, 32 x 32", lambda: ResNet((1, 1), 8, 10), 32),
)

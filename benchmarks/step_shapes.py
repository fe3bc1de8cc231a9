"""What benchmarks.step steps: the parameter shapes of published models, and lists that are extreme.

The shapes are written from the architectures, so that no model library is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

Shape = tuple[int, ...]


def resnet50() -> Iterator[Shape]:
    """ResNet-50 (He et al. 2015), 1000 classes: convolutions, batch norms and one linear layer."""
    yield from _convolution(64, 3, 7)
    incoming = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from _convolution(width, incoming, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(4 * width, width, 1)
            if block == 0:  # the way around it
                yield from _convolution(4 * width, incoming, 1)
            incoming = 4 * width
    yield from _linear(1000, incoming)


def bert_base() -> Iterator[Shape]:
    """BERT-base, uncased (Devlin et al. 2018), with its pooler and without a head."""
    return _bert(width=768, layers=12)


def bert_large() -> Iterator[Shape]:
    """BERT-large, likewise."""
    return _bert(width=1024, layers=24)


def _bert(width: int, layers: int) -> Iterator[Shape]:
    yield from ((rows, width) for rows in (30522, 512, 2))  # words, positions, segments
    yield from _norm(width)
    for _ in range(layers):
        for _ in range(4):  # query, key, value, output
            yield from _linear(width, width)
        yield from _norm(width)
        yield from _linear(4 * width, width)
        yield from _linear(width, 4 * width)
        yield from _norm(width)
    yield from _linear(width, width)


def gpt2_medium() -> Iterator[Shape]:
    """GPT-2 medium (Radford et al. 2019); the head is the word embedding."""
    width = 1024
    yield from ((rows, width) for rows in (50257, 1024))  # words, positions
    for _ in range(24):
        yield from _norm(width)
        yield from _linear(3 * width, width)
        yield from _linear(width, width)
        yield from _norm(width)
        yield from _linear(4 * width, width)
        yield from _linear(width, 4 * width)
    yield from _norm(width)


def _convolution(outgoing: int, incoming: int, kernel: int) -> Iterator[Shape]:
    """A convolution without bias, and its batch norm."""
    yield outgoing, incoming, kernel, kernel
    yield from _norm(outgoing)


def _linear(outgoing: int, incoming: int) -> Iterator[Shape]:
    yield outgoing, incoming
    yield (outgoing,)


def _norm(width: int) -> Iterator[Shape]:
    yield (width,)
    yield (width,)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A list of parameters to step."""

    name: str
    make: Callable[[], Iterator[Shape]]
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def shapes(self) -> list[Shape]:
        """The shape of each parameter."""
        return list(self.make())

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(map(math.prod, self.shapes))


def equal(count: int, size: int) -> Callable[[], Iterator[Shape]]:
    """Return a maker of `count` vectors of `size` numbers."""
    return lambda: iter([(size,)] * count)


CPU, CUDA = ("cpu",), ("cuda",)
# What matters most comes first: time may end before they do.
WORKLOADS = (
    Workload("BERT-large", bert_large, CUDA),
    Workload("ResNet-50", resnet50),
    Workload("1 x 1000M", equal(1, 1_000_000_000), CUDA),
    Workload("10000 x 64", equal(10_000, 64), CUDA),
    Workload("100 x 10M", equal(100, 10_000_000), CUDA),
    Workload("BERT-base", bert_base, CPU),
    Workload("GPT-2-medium", gpt2_medium, CPU),
    Workload("1 x 100M", equal(1, 100_000_000), CPU),
    Workload("1000 x 1024", equal(1000, 1024)),
    Workload("2000 x 64", equal(2000, 64), CPU),
)
# For --quick: seconds in all, and figures that mean nothing.
QUICK = (Workload("30 x 1000", equal(30, 1000)), Workload("100 x 64", equal(100, 64)))
# For --host: so small that what is timed is what the host does for each tensor.
HOST = tuple(Workload(f"{count} x 16", equal(count, 16)) for count in (100, 1000, 10_000))
HOST_QUICK = (Workload("20 x 16", equal(20, 16)),)

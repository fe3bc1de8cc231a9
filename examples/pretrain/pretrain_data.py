"""Text as bytes: Python's reference manual, which every CPython carries, or files of your own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

BLOCK = 4096  # bytes
HELD_OUT = 20  # one block in so many is not trained on


class Text:
    """Bytes, split into a part to train on and one to test on."""

    def __init__(self, files: Sequence[Path] = ()) -> None:
        if files:
            read = b"\n\n".join(file.read_bytes() for file in files)
        else:
            read = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        whole = torch.frombuffer(bytearray(read), dtype=torch.uint8)
        blocks = [*whole.split(BLOCK)]
        self.test = torch.cat(blocks[::HELD_OUT])
        del blocks[::HELD_OUT]
        self.train = torch.cat([whole[:0], *blocks])

    def batch(self, seed: int, step: int, size: int, length: int) -> Tensor:
        """Return the batch of a step in all processes, (size, length + 1): a resumed run needs no
        state of random numbers."""
        generator = torch.Generator().manual_seed((seed << 32) + step)
        starts = torch.randint(len(self.train) - length, (size,), generator=generator)
        return torch.stack([self.train[s : s + length + 1] for s in starts.tolist()]).long()

    def test_batches(self, size: int, length: int) -> list[Tensor]:
        """Return what is not trained on, in batches of up to `size` pieces."""
        pieces = self.test[: len(self.test) // (length + 1) * (length + 1)].view(-1, length + 1)
        return [*pieces.long().split(size)]

"""What benchmarks.quality trains: four small models of examples/, each on data that ships."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# Calls the model with these arguments, and makes a loss of what it returns.
Batch: TypeAlias = tuple[tuple[Any, ...], Callable[[Any], Tensor]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, the order of its batches, and what is measured on data that it has not seen.

    Attributes:
        steps: Of a run.
        lr: The learning rate, which falls to a tenth along a cosine.
        build: Returns the model with random weights.
        batch: Returns the batch of a step, from a seed and the step's number.
        test: Returns batches that are not trained on.
    """

    name: str
    steps: int
    lr: float
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    test: Callable[[], list[Batch]]


def _import(folder: str, module: str) -> Any:
    sys.path.insert(0, str(EXAMPLES / folder))
    try:
        return __import__(module)
    finally:
        sys.path.pop(0)


def _drawn(seed: int, step: int, count: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed << 32) + step)
    return torch.randint(count, (size,), generator=generator)


def digits() -> Task:
    """A network with convolutions reads handwritten digits."""
    task = _import("digits", "digits_task")
    train_x, train_y, test_x, test_y = task.load_data("cpu")

    def batch(seed: int, step: int) -> Batch:
        chosen = _drawn(seed, step, len(train_x), 32)
        return (train_x[chosen],), lambda scores: F.cross_entropy(scores, train_y[chosen])

    def test() -> list[Batch]:
        return [((test_x,), lambda scores: F.cross_entropy(scores, test_y))]

    return Task("digits", 400, 2e-3, task.DigitsNet, batch, test)


def char_lstm() -> Task:
    """A character LSTM goes on with Python's reference manual."""
    module = _import("char_lstm", "char_lstm")
    text = module.Text("cpu")

    def as_batch(inputs: Tensor, targets: Tensor) -> Batch:
        return (inputs,), lambda output: module.cross_entropy(output[0], targets)

    def batch(seed: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed((seed << 32) + step)
        return as_batch(*text.batch(16, 48, generator))

    def test() -> list[Batch]:
        numbers = text.test[: 48 * 256 + 1]
        return [as_batch(numbers[:-1].view(-1, 48), numbers[1:].view(-1, 48))]

    def build() -> nn.Module:
        model: nn.Module = module.CharLSTM(len(text.characters), 64, 1)
        return model

    return Task("char_lstm", 500, 5e-3, build, batch, test)


def bert() -> Task:
    """A small BERT predicts from a docstring which package it is from."""
    data, model = (_import("bert", name) for name in ("bert_data", "bert_model"))
    examples = data.docstrings()
    labels = sorted({example.label for example in examples})
    train, dev = data.split(examples, 0.8)
    encode, count = data.word_tokenizer([example.text for example in train], 32)
    rows, test_rows = (
        [(encode(example.text), labels.index(example.label)) for example in part]
        for part in (train, dev)
    )

    def as_batch(chosen: list[Any]) -> Batch:
        inputs, targets = data.as_batch(chosen)
        arguments = (inputs["input_ids"], inputs["attention_mask"])
        return arguments, lambda output: F.cross_entropy(output.logits, targets)

    def build() -> nn.Module:
        options = argparse.Namespace(
            model_path=None, hidden_size=64, layers=2, max_seq_len=32, dropout=0.0
        )
        built: nn.Module = model.build_model(count, len(labels), options)
        return built

    def batch(seed: int, step: int) -> Batch:
        return as_batch([rows[i] for i in _drawn(seed, step, len(rows), 32).tolist()])

    return Task("BERT", 400, 1e-3, build, batch, lambda: [as_batch(test_rows)])


def decoder() -> Task:
    """A decoder goes on with Python's reference manual, byte by byte."""
    data, model = (_import("pretrain", name) for name in ("pretrain_data", "pretrain_model"))
    text = data.Text()

    def as_batch(pieces: Tensor) -> Batch:
        targets = pieces[:, 1:].flatten()
        return (pieces[:, :-1],), lambda scores: F.cross_entropy(scores.flatten(0, 1), targets)

    def build() -> nn.Module:
        built = model.Decoder(width=48, heads=2, layers=2, length=32, recompute=False)
        built.initialize(torch.initial_seed())
        return built  # type: ignore[no-any-return]

    def batch(seed: int, step: int) -> Batch:
        return as_batch(text.batch(seed, step, 8, 32))

    def test() -> list[Batch]:
        return [as_batch(pieces) for pieces in text.test_batches(64, 32)[:8]]

    return Task("decoder", 20_000, 1e-3, build, batch, test)


TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits, "char_lstm": char_lstm, "BERT": bert, "decoder": decoder
}  # fmt: skip

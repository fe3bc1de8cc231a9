"""Sentences with labels for bert.py: a TSV, or docstrings of Python's library."""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
PADDING, UNKNOWN, BEGIN, END = range(4)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MOST_WORDS = 4000
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Example(NamedTuple):
    """A text, its label, and the file or line that it comes from."""

    label: str
    text: str
    source: str


def read_tsv(path: Path) -> list[Example]:
    """Read lines of `label<TAB>text`.

    Raises:
        ValueError: A line is something else, or there are fewer than two labels.
    """
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        label, tab, text = line.partition("\t")
        if not tab or not label.strip() or not text.strip():
            raise ValueError(f"{path}, line {number}: {line[:60]!r}; it must be label<TAB>text")
        examples.append(Example(label.strip(), text.strip(), f"line {number}"))
    if len({example.label for example in examples}) < 2:
        raise ValueError(f"{path}: all labels of its {len(examples)} lines are equal; give two")
    return examples


def docstrings() -> list[Example]:
    """Return all docstrings of six packages of the standard library, labelled by the package."""
    library = Path(sysconfig.get_path("stdlib"))
    examples = []
    for package in PACKAGES:
        for path in sorted((library / package).rglob("*.py")):
            source = path.relative_to(library).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, DOCUMENTED):
                    text = ast.get_docstring(node)
                    if text:
                        examples.append(Example(package, text, source))
    return examples


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Divide into train and dev; no file is in both, and each label is in both.

    Args:
        examples: All of them.
        share: Of each label's examples, which train gets.
    """
    train: list[Example] = []
    dev: list[Example] = []
    for label in sorted({example.label for example in examples}):
        own = [example for example in examples if example.label == label]
        sizes = Counter(example.source for example in own)
        # By a checksum of the name: in no order, but in the same one on each machine.
        order = sorted(sizes, key=lambda source: zlib.crc32(source.encode()))
        held_out: set[str] = set()
        wanted = max(round((1 - share) * len(own)), 1)
        for source in order:
            if sum(sizes[each] for each in held_out) + sizes[source] <= wanted:
                held_out.add(source)
        held_out = held_out or {min(order, key=lambda source: sizes[source])}
        train += [example for example in own if example.source not in held_out]
        dev += [example for example in own if example.source in held_out]
    return train, dev


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]|[^\sa-z0-9]", text.lower())


def word_tokenizer(texts: Sequence[str], length: int) -> tuple[Callable[[str], list[int]], int]:
    """Make a tokenizer of the words that occur most often.

    Returns:
        A function that returns the numbers of a text's first words, at most `length` with those
        that mark begin and end; and how many different numbers there are.
    """
    counts = Counter(word for text in texts for word in words(text))
    known = [*SPECIAL, *(word for word, _ in counts.most_common(MOST_WORDS))]
    number_of = {word: number for number, word in enumerate(known)}

    def encode(text: str) -> list[int]:
        numbers = [number_of.get(word, UNKNOWN) for word in words(text)[: length - 2]]
        return [BEGIN, *numbers, END]

    return encode, len(known)


def as_batch(
    rows: Sequence[tuple[list[int], int]], padding: int = PADDING
) -> tuple[dict[str, Tensor], Tensor]:
    """Pad texts to the longest of them; return what a model of transformers takes, and labels."""
    longest = max(len(numbers) for numbers, _ in rows)
    ids = torch.full((len(rows), longest), padding)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for row, (numbers, _) in enumerate(rows):
        ids[row, : len(numbers)] = torch.tensor(numbers)
        mask[row, : len(numbers)] = 1
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor([label for _, label in rows])

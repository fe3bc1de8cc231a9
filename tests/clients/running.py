"""Run the clients as a user would, by the command line, and read what they print."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SECONDS = 240  # A run takes less than ten on a machine that does nothing else.
WORDS = 20


def run(folder: Path, *words: object, project: str = "") -> str:
    """Run `python -m apex_mp run WORDS` and return all that it prints.

    Args:
        folder: The working directory.
        *words: Options, target and arguments.
        project: A line of projects.txt, to import that one [what is installed].
    """
    command = [sys.executable, "-m", "apex_mp", "run", *map(str, words)]
    # One thread: the runs are small, and a sum in another order would be another loss.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    if project:
        environment["PYTHONPATH"] = str(folder_of(project))
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    shown = f"{' '.join(command)}\n{result.stdout[-5000:]}"
    assert result.returncode == 0, shown
    # OpenNMT-py prints the traceback of a failed batch, and goes on.
    assert "Traceback" not in result.stdout, shown
    return result.stdout


def folder_of(project: str) -> Path:
    """Return where a project of projects.txt is installed."""
    return Path(sys.prefix) / "projects" / project


class _Unknown:
    """An object of a class of the client's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("builtins", "collections", "torch"):
            return super().find_class(module, name)
        return _Unknown


def checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint without importing the client that wrote it."""
    reader = SimpleNamespace(Unpickler=_Unpickler, __name__="reader")
    found: dict[str, Any] = torch.load(path, pickle_module=reader, weights_only=False)
    return found


def write_sentences(folder: Path) -> None:
    """Write train and valid, .src and .tgt: words in a circle, and the same in capitals.

    A word determines the next one, so that the loss falls evenly from the start: no run owes its
    loss to the step at which it found out how to copy.
    """
    draw = random.Random(1)
    for part, count in (("train", 400), ("valid", 20)):
        lines = []
        for _ in range(count):
            first, length = draw.randrange(WORDS), draw.randint(3, 7)
            lines.append(" ".join(f"w{(first + i) % WORDS}" for i in range(length)) + "\n")
        (folder / f"{part}.src").write_text("".join(lines))
        (folder / f"{part}.tgt").write_text("".join(lines).upper())


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)

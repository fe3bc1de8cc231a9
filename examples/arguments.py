"""Command-line arguments that several recipes take."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def positive(text: str) -> int:
    """Read a whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be a whole number, at least 1")
    return int(text)


def device(text: str) -> torch.device:
    """Read a device that this machine has."""
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(
            f"{text!r} ({reason}); --device cpu runs anywhere"
        ) from None


def existing(text: str) -> Path:
    """Read the name of a file or folder that exists."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text!r}; there is no such file or folder")
    return Path(text)

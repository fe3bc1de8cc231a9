"""Warns of registered functions that write their result to an argument that was cast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.log import warn

_warned: set[str] = set()


def check(name: str, given: Sequence[Any], cast: Sequence[Any], result: Any) -> None:
    """Warn once of a function that has written to the cast of an argument, or may have.

    A write by an extension that increments no version shows only in a function that returns None.

    Args:
        name: The function's name.
        given: The positional arguments of the caller.
        cast: Those that the function got.
        result: What it returned.
    """
    if torch.compiler.is_compiling():
        return
    if name in _warned:
        return
    pairs = zip(given, cast, strict=True)
    new = [
        (index, before, after)
        for index, (before, after) in enumerate(pairs)
        if after is not before and isinstance(after, Tensor)
    ]
    written = [each for each in new if not each[2].is_inference() and each[2]._version > 0]
    # Buffers come last, as a rule.
    suspects = written or (new[-1:] if result is None else [])
    for index, before, after in suspects[:1]:
        _warned.add(name)
        dtypes = [str(each.dtype).removeprefix("torch.") for each in (before, after)]
        warn(
            f"amp: {name} got argument {index} in {dtypes[1]}, cast from {dtypes[0]}; if it "
            "writes its result there, the caller's tensor does not get it. Give that tensor in "
            f"{dtypes[1]}, or as the keyword out, which is not cast; or return a new tensor",
            "an-output-buffer",
        )

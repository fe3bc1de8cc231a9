"""One line after a traceback that an option of the run would have spared."""

from __future__ import annotations

import argparse
import functools
import linecache
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from apex_mp._run.modernize.python import ABSTRACT, NUMPY_NAMES
from apex_mp._run.replacements import Replacements
from apex_mp._run.settings import Settings

_ABSENT = r"module '{0}' has no attribute '({1})'|cannot import name '({1})' from '{0}'"
_NUMPY = "|".join(NUMPY_NAMES)
# (what an error says, what --modernize supplies)
_MODERNIZED = [
    (r"No module named 'torch\._six'|module 'torch' has no attribute '_six'", "torch._six"),
    (r"Weights only load failed", "torch.load of any pickle"),
    (r"only supports boolean masks|expected BoolTensor for mask", "masks of uint8"),
    (r"Subtraction, the `-` operator, with (a|two) bool tensor", "subtraction of bool masks"),
    (_ABSENT.format("inspect", "getargspec"), "inspect.getargspec"),
    (_ABSENT.format("collections", "|".join(ABSTRACT)), "the abstract classes in collections"),
    (_ABSENT.format("numpy", _NUMPY), "the names that numpy has dropped"),
    (rf"`np\.({_NUMPY})` was removed", "the names that numpy has dropped"),
    (
        r"(LR|LROnPlateau|WarmRestarts)\.__init__\(\) (got an unexpected keyword argument 'verbose'"
        r"|takes from \d+ to \d+ positional arguments)",
        "the argument verbose of schedulers",
    ),
    (r"view size is not compatible with input tensor's size", "view of what is not contiguous"),
    (
        r"result type Float can't be cast to the desired output type (Byte|Char|Short|Int|Long)",
        "division of integers into an integer tensor",
    ),
    (r"DataLoaderIter' object has no attribute 'next'", "next() of a DataLoader's iterator"),
]
_WANTS_GPU = re.compile(
    "Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
    "|requires CUDA support|without ATen_cuda library|attribute '_cuda_|NVTX functions not"
    "|instantiate dummy base class|deserialize object on a CUDA device"
    "|t have NCCL built in|only supported with GPUs, no GPUs found"
    "|Cannot access accelerator device when none is available"
)
_DEVICE = "--device cpu puts on the CPU what the script puts on a GPU"
_LOCAL_RANK = re.compile("unrecognized arguments: .*--local-rank")


def line_for(error: BaseException, settings: Settings) -> str | None:
    """Return what to say of an error that has ended a script, or None.

    Args:
        error: Of this process, or one that brings the words of another process.
        settings: What was asked for already.
    """
    said = "".join(traceback.format_exception_only(type(error), error))
    if settings.device is None and _WANTS_GPU.search(said):
        return _line(_DEVICE)
    if settings.modernize:
        return None
    for words, what in _MODERNIZED:
        if re.search(words, said):
            return _supplied(what)
    if "'NoneType' object has no attribute" in said and ".grad" in _last_line(error):
        return _supplied("gradients that zero_grad() sets to zero, not None")
    return None


def after(hook: Callable[..., Any], settings: Settings) -> Callable[..., None]:
    """Return an excepthook that adds a line to what `hook` prints."""

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        hook(kind, error, trace)
        line = line_for(error, settings)
        if line is not None:
            print(line, file=sys.stderr)

    return excepthook


def watch_options(replacements: Replacements, settings: Settings) -> None:
    """Let argparse, which exits by itself, say it of the option that a launcher gives."""
    original = argparse.ArgumentParser.error

    @functools.wraps(original)
    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        try:
            original(self, message)
        finally:
            declared = "--local_rank" in self._option_string_actions
            if declared and not settings.modernize and _LOCAL_RANK.search(message):
                print(
                    _supplied("--local_rank from launchers that say --local-rank"), file=sys.stderr
                )

    replacements.set(argparse.ArgumentParser, "error", error)


def _line(text: str) -> str:
    return f"apex_mp run: {text} [docs/troubleshooting.md#an-old-script-stops]"


def _supplied(what: str) -> str:
    return _line(f"--modernize supplies this: {what}")


def _last_line(error: BaseException) -> str:
    """The line of source where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return linecache.getline(frames[-1].filename, frames[-1].lineno or 0) if frames else ""

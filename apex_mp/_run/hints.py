"""A hint, printed after a traceback, that an option of the run would avoid the error."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from apex_mp._run.modernize import packages
from apex_mp._run.modernize.names import DROPPED, REPLACED
from apex_mp._run.settings import Settings
from apex_mp.core.log import see

_ABSENT = r"module '{0}' has no attribute '({1})'|cannot import name '({1})' from '{0}'"
_LINEAR = "linear algebra that torch has moved to torch.linalg"
# (what an error says, what --modernize supplies)
_MODERNIZED = [
    (r"No module named 'torch\._six'|module 'torch' has no attribute '_six'", "torch._six"),
    (r"Weights only load failed", "torch.load of any pickle"),
    (r"only supports boolean masks|expected BoolTensor for mask", "masks of uint8"),
    (r"Subtraction, the `-` operator, with (a|two) bool tensor", "subtraction of bool masks"),
    *(
        (_ABSENT.format(re.escape(module), "|".join(names)), f"names that {module} has dropped")
        for module, names in [*DROPPED.items(), *packages.NAMES.items()]
    ),
    (rf"`np\.({'|'.join(DROPPED['numpy'])})` was removed", "names that numpy has dropped"),
    (r"load\(\) missing 1 required positional argument: 'Loader'", "yaml.load without a Loader"),
    (
        rf"(?s)This function was deprecated since .*torch\.(linalg\.)?({'|'.join(REPLACED)})\b",
        _LINEAR,
    ),
    (r"\basync\s*=", "async=True of cuda() and the like, which is non_blocking=True"),
    (r"a view of a leaf Variable that requires grad", "in-place changes of views of parameters"),
    (r"invalid index of a 0-dim tensor", "an index of a tensor of one number, as in loss.data[0]"),
    (
        r"(LR|LROnPlateau|WarmRestarts)\.__init__\(\) (got an unexpected keyword argument 'verbose'"
        r"|takes from \d+ to \d+ positional arguments)",
        "the argument verbose of schedulers",
    ),
    (r"view size is not compatible with input tensor's size", "view of what is not contiguous"),
    (
        r"object\.__init__\(\) takes exactly one argument|Sampler\(\) takes no arguments",
        "the data source of Sampler.__init__",
    ),
    (r"i?stft requires ", "torch.stft and istft of pairs of numbers"),
    (
        r"inhomogeneous shape|Unable to avoid copy|binary mode of fromstring"
        r"|when allow_pickle=False",
        "what functions of numpy did",
    ),
    (
        r"'(ImageDraw|FreeTypeFont|ImageFont)' object has no attribute "
        r"'(multiline_textsize|textsize|getsize)'",
        "sizes of text of PIL",
    ),
    (r"object has no attribute 'tostring_rgb'", "tostring_rgb of matplotlib"),
    (r"has no attribute '(batch_encode_plus|encode_plus|max_len)'", "methods of tokenizers"),
    (r"DataLoaderIter' object has no attribute 'next'", "next() of a DataLoader's iterator"),
]
_INTO_INTEGERS = (
    r"result type Float can't be cast to the desired output type (Byte|Char|Short|Int|Long)"
)
_FULL = "torch.full of an int, which had the default floating dtype"
_WANTS_GPU = re.compile(
    "Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
    "|requires CUDA support|without ATen_cuda library|attribute '_cuda_|NVTX functions not"
    "|instantiate dummy base class|deserialize object on a CUDA device"
    "|t have NCCL built in|only supported with GPUs, no GPUs found"
    "|Cannot access accelerator device when none is available"
)
_MASTERS = "--master-weights trains float16 weights, with float32 masters"
_DEVICE = "--device cpu puts on the CPU what the script puts on a GPU"


def line_for(error: BaseException, settings: Settings) -> str | None:
    """Return the hint for an error that has ended a script, or None."""
    said = "".join(traceback.format_exception_only(type(error), error))
    if settings.device is None and _WANTS_GPU.search(said):
        return _line(_DEVICE)
    if "nvidia-smi" in said:
        return _line(
            "there is no nvidia-smi here; do without it, or put a program of this name on PATH"
        )
    if "Attempting to unscale FP16 gradients" in said:
        return _line(_MASTERS)
    if settings.modernize:
        return None
    if re.search(_INTO_INTEGERS, said):
        divides = re.search(r"/|\bdiv", _last_line(error))
        what = "division of integers into an integer tensor" if divides else _FULL
        return _supplied(what)
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


def _line(text: str) -> str:
    advice = "; python -m apex_mp check names what else it needs"
    return f"apex_mp run: {text}{advice}{see('an-old-script-stops')}"


def _supplied(what: str) -> str:
    return _line(f"--modernize supplies this: {what}")


def _last_line(error: BaseException) -> str:
    """Return the line of source where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return linecache.getline(frames[-1].filename, frames[-1].lineno or 0) if frames else ""

"""`--device cpu`: tensors that a script puts on a GPU are on the CPU.

torch.cuda reports one GPU to the script, and none to torch itself and apex_mp: the answer depends
on the calling module. So conditions in the script hold, and torch's code for GPUs stays off.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_mp._run.cpu import cuda_module, facts, libraries, places, tensors
from apex_mp._run.replacements import Replacements

ANNOUNCEMENT = (
    "apex_mp run: --device cpu: everything that the script puts on a GPU lies on the CPU; "
    "torch.cuda answers as if there were one"
)
_SLOW = (
    "apex_mp run: on a CPU float16 convolutions take many times as long as float32 ones; "
    "--dtype bfloat16 casts to bfloat16 instead"
)


def redirect(replacements: Replacements) -> None:
    """Make "cuda" mean the CPU in this process."""
    # tensors first, because its lists of torch's factories must be made from the originals.
    tensors.replace(replacements)
    places.replace(replacements)
    cuda_module.replace(replacements)
    facts.replace(replacements)
    libraries.replace(replacements)
    for name in ("conv1d", "conv2d", "conv3d"):
        original = getattr(torch.nn.functional, name)
        replacements.set(torch.nn.functional, name, _warning_of_float16(original))


def _warning_of_float16(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def convolution(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        is_cast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if is_cast else input.dtype
        if dtype == torch.float16:
            _warn_of_float16()
        return original(input, *args, **kwargs)

    return convolution


@functools.cache
def _warn_of_float16() -> None:
    print(_SLOW, file=sys.stderr)

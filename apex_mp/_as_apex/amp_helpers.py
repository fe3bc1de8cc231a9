"""Small functions of apex.amp.utils, compat and rnn_compat, which scripts call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.log import logger

LOG = logger("apex_mp.amp")

# apex.amp.__version__, of all years.
VERSION = (0, 1, 0)
__version__ = "0.1.0"

# apex.amp.rnn_compat
RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Return False: recurrent layers are not those of before PyTorch 1.0."""
    return False


# apex.amp.compat


def variable_is_tensor() -> bool:
    """Return True: Variable and Tensor are one class."""
    return True


def tensor_is_variable() -> bool:
    """See `variable_is_tensor`."""
    return True


def tensor_is_float_tensor() -> bool:
    """Return False: tensors are not of type torch.FloatTensor, as before PyTorch 0.4."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Return whether it is a tensor."""
    return isinstance(x, Tensor)


def is_floating_point(x: Tensor) -> bool:
    """Return `x.is_floating_point()`."""
    return x.is_floating_point()


def scalar_python_val(x: Any) -> Any:
    """Return the number in a tensor of one element, or in a sequence of one."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Return those names that a module or class has."""
    return [name for name in attrs if hasattr(module, name)]


# apex.amp.utils


def is_cuda_enabled() -> bool:
    """Return whether torch is built with CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """Return the version of the CUDA that torch is built with, () without one."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_nested(x: Any) -> bool:
    """Return whether it is a list or a tuple."""
    return isinstance(x, (list, tuple))


def is_fp_tensor(x: Any) -> bool:
    """Return whether it is a floating tensor, or a list or tuple of nothing else."""
    if is_nested(x):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()


def type_string(x: Tensor) -> str:
    """Return the type's name without its module, such as "HalfTensor"."""
    return x.type().rpartition(".")[2]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return float32 tensors as float16, also in lists and tuples; all else as it is."""
    return _cast(x, torch.float32, torch.float16, f"Float->Half ({name})" if verbose else None)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return float16 tensors as float32; see `maybe_half`."""
    return _cast(x, torch.float16, torch.float32, f"Half->Float ({name})" if verbose else None)


def _cast(x: Any, source: torch.dtype, target: torch.dtype, line: str | None) -> Any:
    if is_nested(x):
        cast = [_cast(item, source, target, None) for item in x]
        return type(x)(*cast) if hasattr(x, "_fields") else type(x)(cast)
    if not isinstance(x, Tensor) or x.dtype != source:
        return x
    if line is not None:
        LOG.info(line)
    return x.to(target)


def as_inplace(fns: Iterable[str]) -> Iterable[str]:
    """Yield the names of the functions that work in place."""
    return (f"{name}_" for name in fns)


def has_func(mod: Any, fn: str) -> bool:
    """Return whether a module, class or dict has a function of that name."""
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)


def get_func(mod: Any, fn: str) -> Any:
    """Return a function of a module, class or dict."""
    return mod[fn] if isinstance(mod, dict) else getattr(mod, fn)


def set_func(mod: Any, fn: str, new_fn: Any) -> None:
    """Set a function of a module, class or dict."""
    if isinstance(mod, dict):
        mod[fn] = new_fn
    else:
        setattr(mod, fn, new_fn)

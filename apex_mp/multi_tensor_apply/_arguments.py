"""Checks of the arguments of amp_C's functions, and their overflow flag."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import tensors

Lists = Sequence[Sequence[Tensor]]


def check_lists(function: str, tensor_lists: Lists, names: Sequence[str]) -> None:
    """Refuse lists that do not belong together."""
    if not isinstance(tensor_lists, (list, tuple)):
        raise TypeError(
            f"{function}: tensor_lists is a {type(tensor_lists).__name__}; it must be a list of "
            f"lists of tensors: {', '.join(names)}"
        )
    if len(tensor_lists) != len(names):
        raise RuntimeError(
            f"{function}: tensor_lists holds {len(tensor_lists)} lists; "
            f"it must hold {len(names)}: {', '.join(names)}"
        )
    for name, given in zip(names, tensor_lists, strict=True):
        if not isinstance(given, (list, tuple)):
            raise TypeError(
                f"{function}: {name} is a {type(given).__name__}; it must be a list of tensors"
            )
        for index, tensor in enumerate(given):
            check_tensor(function, f"{name}[{index}]", tensor)
    first, *others = tensor_lists
    if not first:
        raise RuntimeError(f"{function}: {names[0]} is empty; it must hold a tensor at least")
    for name, given in zip(names[1:], others, strict=True):
        if len(given) != len(first):
            raise RuntimeError(
                f"{function}: {name} holds {len(given)} tensors, {names[0]} holds {len(first)}; "
                "they must be as many"
            )
        for index, (tensor, reference) in enumerate(zip(given, first, strict=True)):
            if tensor.numel() != reference.numel():
                raise RuntimeError(
                    f"{function}: {name}[{index}] has {tensor.numel()} elements, "
                    f"{names[0]}[{index}] has {reference.numel()}; they must be as many"
                )


def check_tensor(function: str, name: str, tensor: Any) -> None:
    """Refuse everything but a floating tensor with memory."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: {name} is a {type(tensor).__name__}; it must be a tensor")
    reason = tensors.not_readable(tensor)
    if reason is not None:
        raise RuntimeError(f"{function}: {name} {reason}")


@contextlib.contextmanager
def raising(function: str, flag: Tensor) -> Iterator[Tensor]:
    """Yield `found_inf` for the operators, and set apex's overflow flag by it afterwards.

    The flag, of any dtype with one element, is read and written on its device: the host never
    waits. It is set to 1 and never cleared. Autograd is off in the block, because old callers pass
    parameters.
    """
    wish = "it must be a tensor of one, such as torch.cuda.IntTensor([0])"
    if not isinstance(flag, Tensor):
        raise TypeError(f"{function}: the overflow flag is a {type(flag).__name__}; {wish}")
    if flag.numel() != 1:
        raise RuntimeError(f"{function}: the overflow flag has {flag.numel()} elements; {wish}")
    if flag.is_meta:
        raise RuntimeError(f"{function}: the overflow flag is on meta; it must be on a device")
    found_inf = (flag.detach().reshape(()) != 0).float()
    with torch.no_grad():
        yield found_inf
        flag.detach().logical_or_(found_inf)


@contextlib.contextmanager
def speaking_of(function: str, **names: str) -> Iterator[None]:
    """Make error messages in the block name this function and its arguments."""
    try:
        yield
    except RuntimeError as error:
        said = re.match(r"[\w.]+: (.*)", str(error), re.DOTALL)
        if said is None:
            raise
        words = said[1]
        for inner, outer in {"found_inf": "the overflow flag", **names}.items():
            words = re.sub(rf"\b{inner}\b", outer, words)
        raise RuntimeError(f"{function}: {words}") from None


def number(function: str, name: str, value: Any) -> Tensor:
    """Return a factor as a tensor of one float32 or float64 element."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise RuntimeError(f"{function}: {name} has {value.numel()} elements; it must have 1")
        return value if value.dtype in (torch.float32, torch.float64) else value.double()
    if not isinstance(value, (int, float)):
        # Numbers of numpy are not of type float, but convert to it.
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise TypeError(
                f"{function}: {name} is {value!r}; it must be a number, or a tensor of one element"
            )
        value = float(value)
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def check_choice(function: str, name: str, value: Any, meanings: dict[int, str]) -> None:
    """Check that a number is one of the choices."""
    if value not in meanings:
        wish = " or ".join(f"{key} ({meaning})" for key, meaning in meanings.items())
        raise ValueError(f"{function}: {name} is {value!r}; it must be {wish}")


def check_step(function: str, step: Any) -> None:
    """Refuse a step number that is not a number of at least 1."""
    if isinstance(step, (str, bytes)) or not hasattr(step, "__float__"):
        raise TypeError(f"{function}: step is {step!r}; it must be the step's number, from 1")
    if step < 1:
        raise ValueError(f"{function}: step is {step}; the first step is 1")

"""Devices: a script sees "cuda", and where it gives that to torch, it is the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device

from apex_mp._run.replacements import Replacements, called_by_torch


def on_cpu(device: Any) -> Any:
    """Return the CPU for a GPU, and any other device as it is."""
    if isinstance(device, bool):
        return device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, int) or (
        isinstance(device, str) and device.partition(":")[0] in ("cuda", "gpu")
    ):
        return "cpu"
    return device


def type_on_cpu(kind: Any) -> Any:
    """Return a tensor type on the CPU: "torch.FloatTensor" for "torch.cuda.FloatTensor"."""
    return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind


def replace(replacements: Replacements) -> None:
    """Make `with torch.device("cuda"):` and torch.Generator mean the CPU."""
    context = _device.DeviceContext
    replacements.set(context, "__init__", _first(context.__init__))
    replacements.set(torch, "Generator", _stand_in(torch.Generator, _generator))
    replacements.set(torch, "device", _stand_in(torch.device, _device_of))


def _first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, device: Any) -> None:  # noqa: N807
        original(self, on_cpu(device))

    return __init__


def _device_of(*args: Any, **kwargs: Any) -> torch.device:
    """Return "cuda:1" for 1: without a GPU torch knows of no device by its number."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (f"cuda:{args[0]}", *args[1:])
    return _Device(*args, **kwargs)


def _generator(device: Any = "cpu") -> torch.Generator:
    place = on_cpu(device)
    return (_Generator if place is device else _GeneratorOfGpu)(place)


_Device, _Generator = torch.device, torch.Generator
_FIRST_GPU = torch.device("cuda", 0)


class _GeneratorOfGpu(torch.Generator):
    """A generator of the CPU that a script has made for a GPU, and compares with its tensors."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _Device("cpu") if called_by_torch() else _FIRST_GPU


def _stand_in(real: Any, make: Callable[..., Any]) -> type:
    """Return a class in the place of `real` that makes its objects by `make`."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is real  # torch.fx and Dynamo look it up

        def __hash__(cls) -> int:
            return hash(real)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    known = {"__module__": "torch", "__doc__": real.__doc__, "__wrapped__": real}
    return Meta(real.__name__, (), known)

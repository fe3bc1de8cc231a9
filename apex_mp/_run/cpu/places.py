"""Devices: a script sees "cuda", and where it gives that to torch, it is the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device

from apex_mp._run.replacements import Replacements


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
    replacements.set(torch, "Generator", _stand_in(torch.Generator, on_cpu))
    replacements.set(torch, "device", _stand_in(torch.device, _numbered))


def _first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, device: Any) -> None:  # noqa: N807
        original(self, on_cpu(device))

    return __init__


def _numbered(place: Any) -> Any:
    """Return "cuda:1" for 1: without a GPU torch knows of no device by its number."""
    is_number = isinstance(place, int) and not isinstance(place, bool)
    return f"cuda:{place}" if is_number else place


def _stand_in(real: Any, change: Callable[[Any], Any]) -> type:
    """Return a class whose calls make objects of class `real`, and which isinstance accepts.

    Args:
        real: The class.
        change: Called with the device that is given; what it returns takes its place.
    """

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            args = (*map(change, args[:1]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = change(kwargs["device"])
            return real(*args, **kwargs)

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

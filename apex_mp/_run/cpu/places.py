"""Names of devices: in strings, numbers and torch.devices "cuda" becomes the CPU."""

from __future__ import annotations

from typing import Any

import torch

from apex_mp._run.replacements import Replacements


def on_cpu(device: Any) -> Any:
    """Return the CPU for a GPU, and any other device as it is."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (
        isinstance(device, str) and device.partition(":")[0] in ("cuda", "gpu")
    ):
        return "cpu"
    return device


def type_on_cpu(kind: Any) -> Any:
    """Return a tensor type on the CPU: "torch.FloatTensor" for "torch.cuda.FloatTensor"."""
    return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind


def replace(replacements: Replacements) -> None:
    """Make torch.device and torch.Generator return ones for the CPU."""
    for name in ("device", "Generator"):
        replacements.set(torch, name, _stand_in(getattr(torch, name)))


def _stand_in(real: Any) -> type:
    """Return a class whose calls make objects of class `real`, and which isinstance accepts."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 2:  # torch.device("cuda", 0)
                args = (on_cpu(args[0]),) if args[0] == "cuda" else args
            kwargs = {name: on_cpu(value) for name, value in kwargs.items() if name != "index"}
            return real(*map(on_cpu, args), **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    known = {"__module__": "torch", "__doc__": real.__doc__, "__wrapped__": real}
    return Meta(real.__name__, (), known)

"""Tensors and modules that a script makes on a GPU, or moves there, are on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device

from apex_mp._run.cpu.places import on_cpu, type_on_cpu
from apex_mp._run.replacements import Replacements, called_by_torch

# Functions that take a device, beside those in torch's own list.
_LIKE = (
    "empty_like",
    "full_like",
    "normal",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
)
_NEW = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def replace(replacements: Replacements) -> None:
    """Replace functions and methods of torch, Tensor and Module that take a device."""
    for module, name in _factories():
        replacements.set(module, name, _keyword(getattr(module, name)))
    for name in _NEW:
        replacements.set(Tensor, name, _keyword(getattr(Tensor, name)))
    replacements.set(Tensor, "to", _copy_to(_to(Tensor.to)))
    replacements.set(torch.nn.Module, "to", _to(torch.nn.Module.to))
    for name in ("addmm", "baddbmm", "bmm", "mm"):
        replacements.set(torch, name, _in_out_dtype(getattr(torch, name)))
    replacements.set(Tensor, "cpu", _cpu(Tensor.cpu))
    replacements.set(Tensor, "type", _type(Tensor.type))
    replacements.set(Tensor, "is_cuda", _to_scripts(True, Tensor.is_cuda, Tensor.device))
    replacements.set(
        Tensor, "device", _to_scripts(torch.device("cuda", 0), Tensor.device, Tensor.device)
    )
    for name in ("cuda", "pin_memory"):
        replacements.set(Tensor, name, _itself)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        replacements.set(storage, "cuda", _itself)
    replacements.set(Tensor, "record_stream", lambda self, stream: None)
    replacements.set(Tensor, "get_device", _get_device(Tensor.get_device))
    # A lazy parameter lists the methods that are allowed before it has a shape.
    lazy: Any = torch.nn.UninitializedParameter.__bases__[0]
    ours = [getattr(Tensor, name) for name in ("cpu", "cuda", "get_device", "to")]
    replacements.set(lazy, "_allowed_methods", [*lazy._allowed_methods, *ours])


def _factories() -> list[tuple[ModuleType, str]]:
    """Return the functions that make a tensor on a device, each with its module."""
    known = _device._device_constructors()
    modules = (torch, torch.fft, torch.signal.windows)
    found = [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and value in known
    ]
    nested = ((torch.nested, name) for name in ("as_nested_tensor", "nested_tensor"))
    return [*found, *((torch, name) for name in _LIKE), *nested]


def _keyword(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes a device by keyword only, and may take `pin_memory`."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return wrapper


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    original = _keyword(original)

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *map(on_cpu, args[:1]), *args[1:], **kwargs)

    return to


def _in_out_dtype(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a product whose `out_dtype` only CUDA has."""

    @functools.wraps(original)
    def product(*args: Any, out_dtype: Any = None, **kwargs: Any) -> Tensor:
        if out_dtype is not None:
            args = tuple(arg.to(out_dtype) if isinstance(arg, Tensor) else arg for arg in args)
        return original(*args, **kwargs)

    return product


def _itself(self: Any, *_: Any, **__: Any) -> Any:
    """Return the object: it is on the right device already."""
    return self


def _copy_to(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return a copy where the script names the CPU, as `_cpu` does."""
        moved = original(self, *args, **kwargs)
        if moved is not self or called_by_torch():
            return moved
        place = kwargs.get("device", args[0] if args else None)
        is_cpu = isinstance(place, (str, torch.device)) and torch.device(place).type == "cpu"
        return moved.clone() if is_cpu else moved

    return to


def _cpu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return a copy, as from a GPU: scripts keep it while they change the original."""
        moved = original(self, *args, **kwargs)
        return moved.clone() if moved is self and not called_by_torch() else moved

    return cpu


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, type_on_cpu(dtype), *args, **kwargs)
        name = original(self)
        # Scripts group tensors by such names, and ignore those that are not on a GPU.
        return name if called_by_torch() else name.replace("torch.", "torch.cuda.", 1)

    return type_


def _to_scripts(value: Any, original: Any, device: Any) -> property:
    """Return an attribute that is, for scripts and tensors on the CPU, `value`."""

    def attribute(self: Tensor) -> Any:
        is_ours = device.__get__(self).type == "cpu" and not called_by_torch()
        return value if is_ours else original.__get__(self)

    return property(attribute)


def _get_device(original: Callable[..., int]) -> Callable[..., int]:
    def get_device(self: Tensor) -> int:
        return original(self) if called_by_torch() else 0

    return get_device

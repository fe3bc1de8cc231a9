"""Checkpoints, processes, parallel models and autocast: arguments that name a GPU mean the CPU."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from apex_mp._run.cpu.places import on_cpu, type_on_cpu
from apex_mp._run.replacements import Replacements, called_by_torch, unless_torch
from apex_mp.parallel import multiproc
from apex_mp.parallel.sync_batchnorm import forward_on_cpu

_NCCL = re.compile(r"nccl|(?=.*\bcuda:nccl\b)\w+:\w+(,\w+:\w+)*")


def replace(replacements: Replacements) -> None:
    """Replace functions and classes that take a device or backend, except those for tensors."""
    for owner in (torch, torch.jit):
        replacements.set(owner, "load", _load(owner.load))
    for name, change in (
        ("set_default_tensor_type", type_on_cpu),
        ("set_default_device", on_cpu),
    ):
        replacements.set(torch, name, _first(getattr(torch, name), change))
    autocast = torch.amp.autocast_mode.autocast
    replacements.set(autocast, "__init__", _autocast(autocast.__init__))
    for name, function in _autocast_functions().items():
        replacements.set(torch, name, unless_torch(function, getattr(torch, name)))
    replacements.set(torch, "compile", unless_torch(_eager, torch.compile))
    replacements.set(torch.nn.Module, "compile", lambda module, *_, **__: _note_eager())
    scaler = torch.amp.GradScaler
    replacements.set(scaler, "__init__", _keyword_or_second(scaler.__init__))
    replacements.set(torch.random, "fork_rng", _without_gpus(torch.random.fork_rng))
    loader = torch.utils.data.DataLoader
    replacements.set(loader, "__init__", _without_pinning(loader.__init__))
    profile = torch.autograd.profiler.profile
    replacements.set(profile, "__init__", _of_cpu(profile.__init__))
    replacements.set(torch.nn.parallel, "data_parallel", _data_parallel)
    replacements.set(multiproc, "device_count", lambda: 1)
    if not distributed.is_available():
        return
    for name in ("init_process_group", "new_group"):
        replacements.set(distributed, name, _with_gloo(getattr(distributed, name)))
    parallel = torch.nn.parallel.DistributedDataParallel
    replacements.set(parallel, "__init__", _without_devices(parallel.__init__))
    # torch refuses its SyncBatchNorm on a CPU, in the wrapper and in the layer.
    replacements.set(parallel, "_passing_sync_batchnorm_handle", lambda self, module: None)
    replacements.set(torch.nn.SyncBatchNorm, "forward", forward_on_cpu)


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Keys and values of a dictionary may name GPUs.
        gone = map_location is None or isinstance(map_location, dict)
        return original(f, "cpu" if gone else on_cpu(map_location), *args, **kwargs)

    return load


def _first(original: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(value: Any) -> Any:
        return original(change(value))

    return wrapper


def _autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if device_type == "cuda":
            device_type = "cpu"
            dtype = args[0] if args else kwargs.pop("dtype", None)
            args = (dtype or torch.get_autocast_dtype("cuda"), *args[1:])
        original(self, device_type, *args, **kwargs)

    return __init__


def _autocast_functions() -> dict[str, Callable[..., Any]]:
    """Return functions by which scripts ask for autocast on the GPU."""
    dtype_of, is_enabled = torch.get_autocast_dtype, torch.is_autocast_enabled

    def get_autocast_dtype(device: str) -> torch.dtype:
        is_on = on_cpu(device) == "cpu" and is_enabled("cpu")
        return dtype_of("cpu" if is_on else device)

    return {
        "get_autocast_dtype": get_autocast_dtype,
        "get_autocast_gpu_dtype": lambda: get_autocast_dtype("cuda"),
        "is_autocast_enabled": lambda device="cuda": is_enabled(on_cpu(device)),
    }


def _eager(function: Any = None, **_: Any) -> Any:
    """Return a function as it is: compiled code would see that its tensors are on the CPU."""
    if function is None:
        return _eager
    _note_eager()
    return function


@functools.cache
def _note_eager() -> None:
    print(
        "apex_mp run: --device cpu: torch.compile returns what it is given; compiled code would "
        "see the CPU",
        file=sys.stderr,
    )


def _keyword_or_second(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, on_cpu(device), *args, **kwargs)

    return __init__


def _with_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: _gloo_for_nccl(value) for name, value in kwargs.items()}
        kwargs.pop("device_id", None)
        return original(*map(_gloo_for_nccl, args), **kwargs)

    return wrapper


def _gloo_for_nccl(value: Any) -> Any:
    """Return a backend with gloo for nccl, which may be in capitals or one of several."""
    return "gloo" if isinstance(value, str) and _NCCL.fullmatch(value.lower()) else value


def _without_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(  # noqa: N807
        self: Any,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(self, module, None, None, *args, **kwargs)

    return __init__


def _without_gpus(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fork_rng(devices: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Fork the generator of the CPU, which is that of all devices."""
        if not called_by_torch():
            devices = []
        return original(devices, *args, **kwargs)

    return fork_rng


def _without_pinning(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(*args, **kwargs)
        for name in ("pin_memory", "pin_memory_device"):  # torch would warn, in each epoch.
            given.arguments.pop(name, None)
        original(*given.args, **given.kwargs)

    return __init__


def _of_cpu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(  # noqa: N807
        self: Any, enabled: bool = True, use_cuda: bool = False, **kwargs: Any
    ) -> None:
        kwargs.pop("use_device", None)
        original(self, enabled, **kwargs)

    return __init__


def _data_parallel(
    module: torch.nn.Module,
    inputs: Any,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call the module, as torch.nn.parallel.data_parallel does with one device."""
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    return module(*given, **(module_kwargs or {}))

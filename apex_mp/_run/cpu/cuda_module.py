"""torch.cuda as it answers when there is one GPU, which is the CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from apex_mp._run.replacements import Replacements, called_by_torch

_NAME = "CPU in the place of a GPU (apex_mp run --device cpu)"
_CAPABILITY = (7, 0)
_MEMORY = 2**34
_NOTHING = (
    "empty_cache init ipc_collect reset_max_memory_allocated reset_max_memory_cached "
    "reset_peak_memory_stats reset_accumulated_memory_stats set_device set_stream "
    "set_per_process_memory_fraction set_sync_debug_mode synchronize"
)
_ZERO = (
    "current_device max_memory_allocated max_memory_cached max_memory_reserved memory_allocated "
    "memory_cached memory_reserved utilization memory_usage"
)
_CONTEXTS = ("device", "device_of", "stream")
_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


class Stream:
    """A stream on which everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def query(self) -> bool:
        """All is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event of now."""
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for nothing; likewise the others."""

    def wait_event(self, event: Event) -> None:
        """See synchronize."""

    def wait_stream(self, stream: Stream) -> None:
        """See synchronize."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Event:
    """A moment, by the clock of the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Remember now."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to another."""
        return (end_event._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait(self, stream: Stream | None = None) -> None:
        """Wait for nothing."""


class _Context(contextlib.AbstractContextManager[Any]):
    """A device or stream that a script makes current for a block."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def replace(replacements: Replacements) -> None:
    """Replace the functions and classes of torch.cuda."""
    there: dict[str, Any] = {name: _constant(None) for name in _NOTHING.split()}
    there |= {name: _constant(0) for name in _ZERO.split()}
    there |= dict.fromkeys(_CONTEXTS, _Context)
    there |= {f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _TYPES}
    there |= {f"{kind}Storage": getattr(torch, f"{kind}Storage") for kind in _TYPES}
    there |= {"Stream": Stream, "Event": Event}
    there |= {name: _constant(Stream()) for name in ("current_stream", "default_stream")}
    there["is_available"] = _to_scripts(True, torch.cuda.is_available)
    there["is_initialized"] = _to_scripts(True, torch.cuda.is_initialized)
    there["device_count"] = _to_scripts(1, torch.cuda.device_count)
    there["is_current_stream_capturing"] = _constant(False)
    there["is_bf16_supported"] = _constant(True)
    there["get_device_name"] = _constant(_NAME)
    there["get_device_capability"] = _constant(_CAPABILITY)
    there["get_device_properties"] = _constant(
        SimpleNamespace(
            name=_NAME,
            major=_CAPABILITY[0],
            minor=_CAPABILITY[1],
            total_memory=_MEMORY,
            multi_processor_count=1,
        )
    )
    there["mem_get_info"] = _constant((_MEMORY, _MEMORY))
    there["memory_stats"] = lambda *_, **__: {}
    there["memory_summary"] = _constant(_NAME)
    for name, value in there.items():
        replacements.set(torch.cuda, name, value)
    _replace_random(replacements)
    for name in ("mark", "range_pop", "range_push"):
        replacements.set(torch.cuda.nvtx, name, _constant(0))


def _replace_random(replacements: Replacements) -> None:
    """The generator of the "GPU" is that of the CPU."""

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def get_rng_state(device: Any = "cuda") -> Any:
        return torch.get_rng_state()

    def set_rng_state(new_state: Any, device: Any = "cuda") -> None:
        torch.set_rng_state(new_state)

    functions: dict[str, Callable[..., Any]] = {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "initial_seed": torch.initial_seed,
        "seed": torch.seed,
        "seed_all": torch.seed,
    }
    for name, function in functions.items():
        replacements.set(torch.cuda, name, _unless_torch(function, getattr(torch.cuda, name)))


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _to_scripts(value: Any, truth: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: truth(*args) if called_by_torch() else value


def _unless_torch(ours: Callable[..., Any], truth: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return (truth if called_by_torch() else ours)(*args, **kwargs)

    return function

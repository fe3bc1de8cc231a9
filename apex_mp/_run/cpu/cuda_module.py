"""torch.cuda with one GPU, which is the CPU."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.cuda import nccl, profiler

from apex_mp._run.cpu.facts import CAPABILITY, MEMORY, NAME, NCCL_VERSION, PROPERTIES
from apex_mp._run.cpu.streams import Context, Event, Stream
from apex_mp._run.replacements import Replacements, to_scripts, unless_torch

_NOTHING = (
    "_sleep check_error empty_cache init ipc_collect reset_accumulated_host_memory_stats "
    "reset_accumulated_memory_stats reset_max_memory_allocated reset_max_memory_cached "
    "reset_peak_host_memory_stats reset_peak_memory_stats set_device "
    "set_per_process_memory_fraction set_stream set_sync_debug_mode synchronize"
)
_ZERO = (
    "clock_rate current_blas_handle current_device current_solver_handle device_memory_used "
    "get_sync_debug_mode max_memory_allocated max_memory_cached max_memory_reserved "
    "memory_allocated memory_cached memory_reserved memory_usage power_draw temperature utilization"
)
_CONTEXTS = ("StreamContext", "device", "device_of", "stream")
_STREAMS = ("current_stream", "default_stream", "get_stream_from_external")
_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_STORAGES = (*_TYPES, "ComplexDouble", "ComplexFloat")


def replace(replacements: Replacements) -> None:
    """Replace the functions and classes of torch.cuda."""
    there: dict[str, Any] = {name: _constant(None) for name in _NOTHING.split()}
    there |= {name: _constant(0) for name in _ZERO.split()}
    there |= dict.fromkeys(_CONTEXTS, Context)
    there |= {f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _TYPES}
    there |= {f"{kind}Storage": getattr(torch, f"{kind}Storage") for kind in _STORAGES}
    there |= {"Stream": Stream, "ExternalStream": Stream, "Event": Event}
    there |= dict.fromkeys(_STREAMS, _constant(Stream()))
    there["is_available"] = to_scripts(True, torch.cuda.is_available)
    there["is_initialized"] = to_scripts(True, torch.cuda.is_initialized)
    there["device_count"] = to_scripts(1, torch.cuda.device_count)
    there["is_current_stream_capturing"] = _constant(False)
    there["is_bf16_supported"] = _constant(True)
    there["is_tf32_supported"] = there["can_device_access_peer"] = _constant(False)
    there["get_device_name"] = there["memory_summary"] = _constant(NAME)
    there["list_gpu_processes"] = _constant(NAME)
    there["get_device_capability"] = _constant(CAPABILITY)
    there["get_device_properties"] = _constant(PROPERTIES)
    there["mem_get_info"] = _constant((MEMORY, MEMORY))
    there["get_per_process_memory_fraction"] = _constant(1.0)
    there["memory_snapshot"] = lambda *_, **__: []
    for name in ("memory_stats", "host_memory_stats"):  # Whatever key a script asks for.
        there[name] = lambda *_, **__: collections.defaultdict(int)
        there[f"{name}_as_nested_dict"] = there[name]
    there["cudart"] = _constant(_Runtime())
    there["default_generators"] = (torch.default_generator,)
    there |= _random_functions()
    for name, value in there.items():
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
            if module is torch.cuda or name in vars(module):
                replacements.set(module, name, value)
    for kind in ("Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"):
        sparse = getattr(torch.sparse, f"{kind}Tensor", None)
        if sparse is not None:
            replacements.set(torch.cuda.sparse, f"{kind}Tensor", sparse)
    replacements.set(torch._C, "_cuda_clearCublasWorkspaces", _constant(None))
    _replace_profilers(replacements)
    replacements.set(nccl, "version", to_scripts(NCCL_VERSION, nccl.version))
    if distributed.is_available():
        there_is_nccl = to_scripts(True, distributed.is_nccl_available)
        replacements.set(distributed, "is_nccl_available", there_is_nccl)


class _Runtime:
    """torch.cuda.cudart(): every function of the CUDA runtime succeeds and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name == "cudaMemGetInfo":
            return _constant((0, MEMORY, MEMORY))
        if name.startswith("cuda"):
            return _constant(0)
        raise AttributeError(f"torch.cuda.cudart() has no attribute {name!r}")


def _replace_profilers(replacements: Replacements) -> None:
    for name in ("mark", "range_end", "range_pop", "range_push", "range_start"):
        replacements.set(torch.cuda.nvtx, name, _constant(0))
    replacements.set(profiler, "cudart", _constant(_Runtime()))
    for name in ("init", "start", "stop"):  # The first was there until 2022.
        replacements.set(profiler, name, _constant(None))
    replacements.set(profiler, "profile", Context)
    replacements.set(torch.autograd.profiler, "emit_nvtx", Context)


def _random_functions() -> dict[str, Callable[..., Any]]:
    """Return functions for the generator of the "GPU", which is that of the CPU."""

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
    return {
        name: unless_torch(function, getattr(torch.cuda, name))
        for name, function in functions.items()
    }


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value

"""Facts about the "GPU" and its software, as of 2019, for scripts that ask."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from apex_mp._run.replacements import Replacements, called_by_torch, to_scripts

NAME = "CPU in the place of a GPU (apex_mp run --device cpu)"
CAPABILITY = (7, 0)
MEMORY = 2**34
NCCL_VERSION = (2, 4, 8)
_CUDA_VERSION, _CUDNN_VERSION = "10.1", 7605
# The fields of torch's device properties, with the values of compute capability 7.0.
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=MEMORY,
    multi_processor_count=1,
    is_integrated=0,
    is_multi_gpu_board=0,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=98304,
    shared_memory_per_multiprocessor=98304,
    L2_cache_size=6291456,
    clock_rate=0,
    memory_clock_rate=0,
    memory_bus_width=0,
    gcnArchName="",
    uuid="",
    pci_bus_id=0,
    pci_device_id=0,
    pci_domain_id=0,
)


def replace(replacements: Replacements) -> None:
    """Make torch.version.cuda, torch.backends.cudnn and similar attributes report a GPU."""
    cudnn: Any = torch.backends.cudnn
    for owner, name, value in (
        (cudnn, "version", _CUDNN_VERSION),
        (cudnn, "is_available", True),
        (torch.backends.cuda, "is_built", True),
    ):
        replacements.set(owner, name, to_scripts(value, getattr(owner, name)))
    for name in ("has_cuda", "has_cudnn"):
        replacements.set(torch, name, True)
    if torch.version.cuda is None:
        _replace_version(replacements, torch.version)


def _replace_version(replacements: Replacements, module: ModuleType) -> None:
    """Replace the attribute by the module's `__getattr__`, which can see the caller."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name == "cuda":
            return None if called_by_torch() else _CUDA_VERSION
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    truth = vars(module).pop("cuda")
    replacements.at_undo(lambda: setattr(module, "cuda", truth))
    replacements.set(module, "__getattr__", __getattr__)

"""`offload=True`: masters and moments in host memory, steps on the CPU, weights on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from apex_mp.core import transfers
from apex_mp.core.log import warn
from apex_mp.core.tensors import is_wrapper


def check_option(who: str, value: Any) -> None:
    """Raise a TypeError unless `offload` is True, False or "gradients"."""
    if not (isinstance(value, bool) or value == "gradients"):
        raise TypeError(f"{who}: offload is {value!r}; it must be True, False or 'gradients'")


def check_group(optimizer: Any, group: Mapping[str, Any], names: Sequence[str] | None) -> None:
    """Refuse a new group that cannot be offloaded; frozen parameters may be anywhere."""
    number = len(optimizer.param_groups)
    for index, param in enumerate(group["params"]):
        if not (isinstance(param, Tensor) and param.requires_grad):
            continue  # If it is no tensor, torch says so.
        named = f" ({names[index]})" if names and names[index] else ""
        where = f"{optimizer._public_name}: params[{number}][{index}]{named}"
        if is_wrapper(param):
            raise TypeError(
                f"{where} is a {type(param).__name__}, and offload is set; it must be False. "
                "FSDP2's CPUOffloadPolicy takes parameters, gradients and states of sharded models "
                "to the host"
            )
        if not transfers.is_offloadable(param.device):
            raise ValueError(
                f"{where} is on {param.device}, and offload is set; it must be on a GPU. Move the "
                "model there before, or leave offload out"
            )
    _check_memory(optimizer, [*optimizer.param_groups, group])
    _warn_of_one_thread(optimizer)


def _check_memory(optimizer: Any, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise a MemoryError, or warn, if states to be made need more host memory than there is."""
    has_grads = optimizer.offload == "gradients"
    rows = [
        (optimizer._rule.layout_of(group).bytes_of(param, group), param.nbytes)
        for group in groups
        for param in group["params"]
        if isinstance(param, Tensor) and param.requires_grad and not is_lazy(param)
        if param not in optimizer.state
    ]
    needed = sum(state for state, _ in rows)
    if has_grads:
        needed += transfers.pinned_bytes([grad for _, grad in rows])
    processes = _processes_here()
    what = "masters, moments and gradients" if has_grads else "masters and moments"
    each = f" in each of {processes} processes" if processes > 1 else ""
    for available, is_limit in (
        (transfers.bytes_up_to_limit(), True),
        (transfers.available_bytes(), False),
    ):
        if available is None or needed * processes <= available:
            continue
        message = (
            f"{optimizer._public_name}: with offload {what} take {needed:,} bytes of host memory"
            f"{each}, and {available:,} are available; split masters and narrower moments take less"
        )
        if is_limit:
            raise MemoryError(message)
        warn(message, "state-in-host-memory")


def _warn_of_one_thread(optimizer: Any) -> None:
    """Warn if the CPU steps with one thread, as torchrun has it, although there are more cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = (cores or 1) // _processes_here()
    if torch.get_num_threads() == 1 and cores > 1:
        warn(
            f"{optimizer._public_name}: with offload the CPU takes the steps, and torch computes "
            f"with 1 thread here, although there are {cores} cores for each process. Set "
            f"OMP_NUM_THREADS={cores}, for which torchrun takes 1, or call torch.set_num_threads",
            "state-in-host-memory",
        )


def _processes_here() -> int:
    """Return the number of processes on this machine that torchrun has started."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "") or 1)

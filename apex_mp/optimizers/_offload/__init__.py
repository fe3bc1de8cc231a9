"""`offload=True`: masters and moments in host memory, steps on the CPU, weights on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from apex_mp.core import transfers
from apex_mp.core.tensors import is_wrapper


def check_option(who: str, value: Any) -> None:
    """Raise a TypeError unless `offload` is True, False or "gradients"."""
    if not (isinstance(value, bool) or value == "gradients"):
        raise TypeError(f"{who}: offload is {value!r}; it must be True, False or 'gradients'")


def check_group(optimizer: Any, group: Mapping[str, Any], names: Sequence[str] | None) -> None:
    """Refuse a new group that cannot be offloaded; frozen parameters may be anywhere.

    Args:
        optimizer: A FusedOptimizer, without the group.
        group: The group, complete.
        names: Of its parameters, empty where there is none [None: none].

    Raises:
        MemoryError: The states to be made, of all groups, need more host memory than there is.
        TypeError: A parameter is a DTensor.
        ValueError: One is not on a GPU.
    """
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


def _check_memory(optimizer: Any, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise a MemoryError if parameters without a state need more host memory than there is."""
    has_grads = optimizer.offload == "gradients"
    needed = sum(
        optimizer._layout(group).bytes_of(param, group) + has_grads * param.nbytes
        for group in groups
        for param in group["params"]
        if isinstance(param, Tensor) and param.requires_grad and not is_lazy(param)
        if param not in optimizer.state
    )
    available = transfers.available_bytes()
    if available is not None and needed > available:
        what = "masters, moments and gradients" if has_grads else "masters and moments"
        raise MemoryError(
            f"{optimizer._public_name}: with offload {what} take {needed:,} bytes of host memory, "
            f"and {available:,} are available; split masters and narrower moments take less"
        )

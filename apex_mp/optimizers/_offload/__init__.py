"""`offload=True`: masters and moments in host memory, steps on the CPU, weights on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from apex_mp.core import transfers
from apex_mp.core.tensors import is_wrapper


def check_option(who: str, value: Any) -> None:
    """Raise a TypeError unless `offload` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{who}: offload is {value!r}; it must be True or False")


def check_params(who: str, number: int, params: Sequence[Tensor], needed: int) -> None:
    """Refuse parameters of a group that cannot be offloaded.

    Args:
        who: The optimizer's name, for messages.
        number: The number of the group.
        params: Its parameters.
        needed: The bytes that their states will take in host memory.

    Raises:
        TypeError: One is a DTensor.
        ValueError: One is not on a GPU.
        MemoryError: There is less host memory.
    """
    for index, param in enumerate(params):
        if is_wrapper(param):
            raise TypeError(
                f"{who}: params[{number}][{index}] is a {type(param).__name__}, and offload is "
                "True; it must be False. FSDP2's CPUOffloadPolicy takes parameters, gradients and "
                "states of sharded models to the host"
            )
        if not transfers.is_offloadable(param.device):
            raise ValueError(
                f"{who}: params[{number}][{index}] is on {param.device}, and offload is True; it "
                "must be on a GPU. Move the model there before, or leave offload out"
            )
    available = transfers.available_bytes()
    if available is not None and needed > available:
        raise MemoryError(
            f"{who}: with offload=True masters and moments of group {number} take {needed:,} bytes "
            f"of host memory, and {available:,} are available"
        )

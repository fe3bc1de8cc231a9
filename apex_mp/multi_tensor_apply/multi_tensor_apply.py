"""MultiTensorApply: calls a function of `amp_C` with the chunk size as its first argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class MultiTensorApply:
    """Call `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`.

    Args:
        chunk_size: Passed on to `op`; the operators here ignore it.

    Attributes:
        available: Always True: the operators come with the package.
        warned: Always False: there is no fallback to warn of.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: without the operators the package cannot be imported."""

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """Call `op` and return what it returns.

        Raises:
            TypeError: `op` cannot be called.
        """
        if not callable(op):
            raise TypeError(
                f"multi_tensor_applier: op is a {type(op).__name__}; it must be a function, such "
                "as amp_C.multi_tensor_scale"
            )
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)

"""The communication hook of DistributedDataParallel: sum or average a bucket of gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


@dataclasses.dataclass
class Reduction:
    """How the gradients of all processes are combined.

    Attributes:
        average: Divide their sum by the number of processes.
        predivide_factor: Divide by it before the sum, and by the rest after. With 1, an average
            divides by the number of processes before the sum, as torch does.
        in_float32: Send low-precision gradients as float32.
        is_on: Whether gradients are sent; if not, each process keeps its own.
        is_held: Whether gradients are not sent after the present forward.
        others: The state and function of a hook that is used instead.
        buffers: The reduced buckets by index.
    """

    average: bool = True
    predivide_factor: float = 1.0
    in_float32: bool = False
    is_on: bool = True
    is_held: bool = False
    others: tuple[Any, Callable[..., Any]] | None = None
    buffers: dict[int, Tensor] | None = None

    @property
    def is_torchs(self) -> bool:
        """Return whether torch does the same without a hook."""
        return self == Reduction()

    def factors(self, world_size: int) -> tuple[float, float]:
        """Return the factors of gradients before and after the sum."""
        if self.average and self.predivide_factor == 1.0:
            return 1.0 / world_size, 1.0
        rest = self.predivide_factor / world_size if self.average else 1.0
        return 1.0 / self.predivide_factor, rest


# torch compares the annotations with types, so they cannot be strings.
def reduce_bucket(
    state: Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Start to reduce a bucket; return a future of its buffer."""
    buffer = bucket.buffer()
    if state.buffers is not None:
        state.buffers[bucket.index()] = buffer
    if state.is_held or not state.is_on:
        as_it_is: torch.futures.Future[Tensor] = torch.futures.Future()
        as_it_is.set_result(buffer)
        return as_it_is
    if state.others is not None:
        others, hook = state.others
        return hook(others, bucket)  # type: ignore[no-any-return]
    before, after = state.factors(dist.get_world_size())
    sent = buffer.float() if state.in_float32 else buffer
    sent.mul_(before)
    future = dist.all_reduce(sent, async_op=True).get_future()
    reduced: torch.futures.Future[Tensor] = future.then(
        lambda done: buffer.copy_(done.value()[0].mul_(after))
    )
    return reduced

"""The tensors that all cases of one workload share, and the bytes that their steps move.

Every case would hold 12 to 20 bytes for each parameter, too much for all to take turns. So they
step the same weights and moments, each through Parameters of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.step_shapes import Shape

# A power of two: unscaling rounds nothing, so that all cases step with the same gradients.
SCALE = 1024.0
# Less than the norm of any workload, so that clipping always has something to do.
MAX_NORM = 0.01
# Small enough that thousands of steps leave the weights finite.
OPTIONS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Pass(NamedTuple):
    """One way over all parameters: bytes read and written for each of them.

    `kernel` is part of the name of the CUDA kernel of ours that makes it; empty if it is not ours.
    """

    name: str
    read: int
    written: int
    kernel: str = ""

    def __str__(self) -> str:
        return f"{self.name} R{self.read} W{self.written}"


class Running(NamedTuple):
    """A case that stands ready: what makes gradients, untimed, and the step."""

    prepare: Callable[[], None]
    step: Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to take a step.

    Attributes:
        name: For the table.
        ours: The case of ours that does the same work, itself for ours.
        passes: What one step reads and writes. Adam counts as one pass, however many kernels
            make it, as do temporaries of less than the model's size.
        build: Makes it on the tensors of an arena.
        devices: Where it runs.
        package: What has to be installed for it, besides torch; empty for nothing.
    """

    name: str
    ours: str
    passes: tuple[Pass, ...]
    build: Callable[[Arena], Running]
    devices: tuple[str, ...] = ("cpu", "cuda")
    package: str = ""

    @property
    def bytes(self) -> int:
        """Bytes that a step moves for each parameter."""
        return sum(each.read + each.written for each in self.passes)


class Arena:
    """Weights, moments and gradients of one workload, made when a case first asks for them.

    No gradient is zero or subnormal: each is 0.5 to 2, of either sign, over SCALE.
    """

    def __init__(self, shapes: Sequence[Shape], device: str, seed: int = 0) -> None:
        self.shapes = shapes
        self.device = device
        self._seed = seed

    @cached_property
    def weights(self) -> list[Tensor]:
        """float32 weights: parameters, or masters of a float16 model."""
        return self._random(torch.float32, 1)

    @cached_property
    def half(self) -> list[Tensor]:
        """The model in float16."""
        return [weight.half() for weight in self._random(torch.float32, 1)]

    @cached_property
    def bfloat(self) -> list[Tensor]:
        """The model in bfloat16."""
        return [weight.bfloat16() for weight in self._random(torch.float32, 1)]

    @cached_property
    def bfloat_masters(self) -> list[Tensor]:
        """Its masters in float32, which no other case steps: FusedAdam would notice."""
        return self._random(torch.float32, 1)

    @cached_property
    def exp_avgs(self) -> list[Tensor]:
        """First moments."""
        return [torch.zeros(shape, device=self.device) for shape in self.shapes]

    @cached_property
    def exp_avg_sqs(self) -> list[Tensor]:
        """Second moments."""
        return [torch.zeros(shape, device=self.device) for shape in self.shapes]

    @cached_property
    def narrow_moments(self) -> tuple[list[Tensor], list[Tensor]]:
        """Both moments in bfloat16."""
        first, second = (
            [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for shape in self.shapes]
            for _ in range(2)
        )
        return first, second

    @cached_property
    def half_grads(self) -> list[Tensor]:
        """Gradients in float16, times SCALE; no case writes them."""
        return self._random(torch.float16, 2)

    @cached_property
    def bfloat_grads(self) -> list[Tensor]:
        """Gradients in bfloat16; no case writes them."""
        return [grad.bfloat16().div_(SCALE) for grad in self.half_grads]

    @cached_property
    def grads(self) -> list[Tensor]:
        """Memory for gradients in float32; several cases write them, so each fills it anew."""
        return [torch.empty(shape, device=self.device) for shape in self.shapes]

    def fill_grads(self, scale: float) -> None:
        """Write the gradients times `scale` to `grads`."""
        torch._foreach_copy_(self.grads, self.half_grads)
        if scale != SCALE:
            torch._foreach_mul_(self.grads, scale / SCALE)

    def not_shared(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return tensors that no other case writes."""
        return [tensor.clone() for tensor in tensors]

    def share_moments(
        self,
        optimizer: torch.optim.Optimizer,
        names: tuple[str, str] = ("exp_avg", "exp_avg_sq"),
        *,
        dtype: torch.dtype = torch.float32,
        **more: Callable[[Tensor], object],
    ) -> None:
        """Give an optimizer the shared moments as its state, and what else it keeps.

        Args:
            optimizer: It.
            names: By which it has the moments.
            dtype: Theirs: float32, bfloat16, or int8, which its first step makes.
            more: Names, and what makes the value of a parameter.
        """
        if dtype == torch.int8:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        is_wide = dtype == torch.float32
        shared = (self.exp_avgs, self.exp_avg_sqs) if is_wide else self.narrow_moments
        for param, *moments in zip(params, *shared, strict=True):
            state: dict[str, object] = {key: make(param) for key, make in more.items()}
            optimizer.state[param] = state | dict(zip(names, moments, strict=True))

    def _random(self, dtype: torch.dtype, stream: int) -> list[Tensor]:
        generator = torch.Generator(self.device).manual_seed(2 * self._seed + stream)
        tensors = []
        for shape in self.shapes:
            tensor = torch.empty(shape, device=self.device).uniform_(0.5, 2.0, generator=generator)
            tensor.view(-1)[::2].neg_()
            tensors.append(tensor.to(dtype))
        return tensors


def parameters(tensors: Iterable[Tensor]) -> list[Parameter]:
    """Return Parameters on the memory of `tensors`."""
    return [Parameter(tensor) for tensor in tensors]


def give_grads(params: Iterable[Tensor], grads: Iterable[Tensor]) -> None:
    """Set gradients as a backward after zero_grad() does: as new tensors."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.data  # Unlike detach(), no operator that a profiler has to record.


def count_on_param(param: Tensor) -> Tensor:
    """Return a count of steps where fused optimizers keep it."""
    return torch.zeros((), device=param.device)


def count_on_host(param: Tensor) -> Tensor:
    """Return a count of steps where torch's other optimizers keep it."""
    return torch.zeros(())

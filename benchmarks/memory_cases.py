"""What benchmarks.memory looks at: the cases of benchmarks.step, each with tensors of its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks import step_cases
from benchmarks.memory_probe import held
from benchmarks.step_arena import SCALE, Arena, Case, Running
from benchmarks.step_shapes import Shape, Workload, equal


class OwnArena(Arena):
    """The tensors of one case, which shares nothing: the first step makes the optimizer's state.

    What is alive then is what the case keeps, and nothing that another one needs.
    """

    optimizer: torch.optim.Optimizer

    def share_moments(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Share nothing, but remember the optimizer."""
        self.optimizer = optimizer

    def not_shared(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return them: there is no other case."""
        return tensors

    @cached_property
    def bfloat_grads(self) -> list[Tensor]:
        """Gradients in bfloat16, without those in float16 that Arena makes them of."""
        return self._random(torch.bfloat16, 2)

    def fill_grads(self, scale: float) -> None:
        """Write gradients times `scale` to `grads`, without those in float16."""
        for grad in self.grads:
            grad.fill_(scale / SCALE)

    @property
    def params(self) -> list[Tensor]:
        """What the optimizer steps: the model, or its masters."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @property
    def grads_that_come_in(self) -> list[Tensor]:
        """The gradients of the model."""
        made = vars(self)
        return made.get("half_grads") or made.get("bfloat_grads") or self.grads

    def held(self) -> dict[str, int]:
        """Return the bytes held between backward and step, by what holds them."""
        made = vars(self)
        weights = made.get("half") or made.get("bfloat") or self.params
        return held(weights, self.grads_that_come_in, self.optimizer)


def build(case: Case, arena: OwnArena) -> Running:
    """Return a case that stands before its first step."""
    running = case.build(arena)
    # FusedAdam was given masters, to share them; here its first step makes them.
    arena.optimizer.state.clear()
    for shared in ("weights", "bfloat_masters"):
        vars(arena).pop(shared, None)
    return running


def looks_for_overflow(case: Case) -> bool:
    """Return whether a case skips a step with inf in a gradient."""
    return "fp16" in case.name or "GradScaler" in case.name


@contextlib.contextmanager
def overflow(arena: OwnArena) -> Iterator[None]:
    """Within it, a gradient that has come in holds inf."""
    last = arena.grads_that_come_in[-1].view(-1)[-1]
    before = last.item()
    last.fill_(math.inf)
    try:
        yield
    finally:
        last.fill_(before)


def torch_for_loop(arena: Arena) -> Running:
    """AdamW of torch, tensor by tensor: its default on a CPU."""
    return step_cases.fp32(arena, torch.optim.AdamW, foreach=False)[0]


_HOLDING_THE_SAME = (step_cases.SCALED_READING, *step_cases.OUR_SCALER)
CASES = (
    # What only reads gradients holds what is held where they are written; GradScaler nothing.
    *(
        case
        for case in (*step_cases.CASES, *step_cases.MODES, *step_cases.MASTERS)
        if case.name not in _HOLDING_THE_SAME
    ),
    Case("torch AdamW, for-loop", step_cases.FP32, (step_cases.ADAM,), torch_for_loop),
)


def transformer() -> Iterator[Shape]:
    """Three layers of a transformer, 512 wide, each a tenth of it in its largest tensor."""
    width = 512
    for _ in range(3):
        for _ in range(4):  # query, key, value, output
            yield from ((width, width), (width,))
        yield from ((4 * width, width), (4 * width,), (width, 4 * width), (width,))
        yield from [(width,)] * 4  # two norms


WORKLOADS = (
    Workload("3 layers of a transformer", transformer),
    Workload("1 x 20M", equal(1, 20_000_000)),
)
# For --quick: so small that fixed costs of some bytes can be seen.
QUICK = (Workload("30 x 10K", equal(30, 10_000)),)

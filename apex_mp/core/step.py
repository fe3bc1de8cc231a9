"""What a fused optimizer's step is asked for, and what it returns then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from apex_mp.core.device_scale import DeviceScale

Lists: TypeAlias = list[list[Tensor | None]]
Groups: TypeAlias = Sequence[dict[str, Any]]


class Outcome(Protocol):
    """What became of a step.

    Attributes:
        is_known: Whether the host has waited for it; else the rest says nothing.
        found_inf: Whether it was skipped, as far as the host knows without having asked for a
            check.
        norms: l2 norm of each group's unscaled gradients; empty if none was measured.
        nonfinite_rows: Which of the parameters that had a gradient held inf or NaN: the first ones,
            if it has been read back.
    """

    @property
    def is_known(self) -> bool: ...

    @property
    def found_inf(self) -> bool: ...

    @property
    def norms(self) -> list[float]: ...

    @property
    def nonfinite_rows(self) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """Where a step finds its gradients, and what it does with them.

    `step(grads=request)` is for a step whose function has the attribute `takes_request`; it returns
    a `StepResult`. Lists hold one list for each parameter group with one item for each parameter.

    Attributes:
        grads: The gradients; None: those of `grads_of`.
        grads_of: The parameters whose `.grad` is the scaled gradient. An item that is None: the
            stepped parameter's own, which is not scaled. None: the stepped parameters.
        copies: Where each new parameter is also written; None: nowhere.
        norms: l2 norm of each group's gradients as they lie; None: measured if need be.
        check: Look for inf and NaN, and do nothing if there is any.
        clip_by_global_norm: Clip each group by the norm of all.
        loss_scale: To be updated by what `check` finds, on its device; None: there is none.
        unscale: A step that is taken leaves scaled gradients of these dtypes unscaled.
        wait: The host is to know the outcome when the step returns.
    """

    grads: Lists | None = None
    grads_of: Lists | None = None
    copies: Lists | None = None
    norms: list[float | Tensor | None] | None = None
    check: bool = False
    clip_by_global_norm: bool = False
    loss_scale: DeviceScale | None = None
    unscale: Sequence[torch.dtype] = ()
    wait: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """What a step returns that was given a `StepRequest`.

    Attributes:
        outcome: What became of the step.
        without_grad: Group and index of the parameters that had no gradient.
        sent: If the outcome is not known yet: the tensor on the device that will hold it, until the
            next step; else None.
        read: Then: makes the outcome of a copy of `sent` on the CPU.
        undo_state: Then, if the step has made state: removes it again; to be called if the step
            turns out to be skipped. None: there is nothing to remove.
    """

    outcome: Outcome
    without_grad: list[tuple[int, int]]
    sent: Tensor | None = None
    read: Callable[[Tensor], Outcome] | None = None
    undo_state: Callable[[], None] | None = None

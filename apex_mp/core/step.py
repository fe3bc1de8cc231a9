"""The request that a fused optimizer's step may be given, and the result that it then returns."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from apex_mp.core.device_scale import DeviceScale

Lists: TypeAlias = list[list[Tensor | None]]
Groups: TypeAlias = Sequence[dict[str, Any]]


class Outcome(Protocol):
    """The outcome of a step.

    Attributes:
        is_known: Whether the host knows it; if not, the other attributes mean nothing.
        found_inf: Whether the step was skipped, as far as the host knows without a check.
        norms: l2 norm of each group's unscaled gradients; empty if none was measured.
        nonfinite_rows: The first parameters, by number among those that had a gradient, whose
            gradients held inf or NaN; empty unless they were read back.
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
    """What a step works on: where its gradients are, and what to do with them.

    `step(grads=request)` is for a step whose function has the attribute `takes_request`; it returns
    a `StepResult`. Lists hold one list for each parameter group with one item for each parameter.

    Attributes:
        grads: The gradients; None: those of `grads_of`.
        grads_of: The parameters whose `.grad` is the scaled gradient. Where an item is None, the
            stepped parameter's own gradient is used, which is not scaled. None: the stepped
            parameters.
        copies: Where each new parameter is also written; None: nowhere.
        norms: l2 norm of each group's gradients before unscaling; None: measured if needed.
        check: Look for inf and NaN, and change nothing if there is any.
        clip_by_global_norm: Clip each group by the norm of all.
        loss_scale: Updated on its device by what `check` finds; None: there is none.
        unscale: If the step is not skipped, scaled gradients of these dtypes are unscaled in place.
        wait: Whether the host knows the outcome when the step returns.
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


@contextlib.contextmanager
def dropping_amp_tensors(optimizer: Any) -> Iterator[None]:
    """A context in which an optimizer steps; an error removes what GradScaler has set on it.

    torch removes both only after a step without an error, and multiplies the next scale by what it
    finds.
    """
    try:
        yield
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        raise


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """What a step that was given a `StepRequest` returns.

    Attributes:
        outcome: The step's outcome.
        without_grad: Group and index of the parameters that had no gradient.
        sent: If the outcome is not known yet, the tensor on the device that will hold it until the
            next step; else None.
        read: If the outcome is not known yet, makes it from a copy of `sent` on the CPU.
        undo_state: If the outcome is not known yet and the step has made state, removes that state;
            the caller calls it if the step was skipped. None: there is nothing to remove.
    """

    outcome: Outcome
    without_grad: list[tuple[int, int]]
    sent: Tensor | None = None
    read: Callable[[Tensor], Outcome] | None = None
    undo_state: Callable[[], None] | None = None

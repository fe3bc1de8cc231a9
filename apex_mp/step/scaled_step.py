"""A step of a fused optimizer that the owner of a loss scale asks for, and its result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from apex_mp.core.tensors import Lists
from apex_mp.scale.device_scale import DeviceScale


class Outcome(Protocol):
    """The outcome of a step.

    Attributes:
        is_known: Whether the host knows it, as it does if nothing was checked; if not, the other
            attributes mean nothing.
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


@dataclasses.dataclass(eq=False)
class ScaledStep:
    """What a step works on, what it does with gradients, and its result.

    `take` hands it to an optimizer. Lists hold one list for each parameter group with one item for
    each parameter.

    Attributes:
        grads: The gradients; None: those of `grads_of`.
        grads_of: The parameters whose `.grad` is the scaled gradient. Where an item is None, the
            stepped parameter's own gradient is used, which is not scaled. None: the stepped
            parameters.
        copies: Where each new parameter is also written; None: nowhere.
        scale: The divisor of scaled gradients.
        norms: l2 norm of each group's gradients before unscaling; None: measured if needed.
        found_inf: One float32 number on any device: if it is not 0, nothing is changed. None: it is
            not known.
        check: Look for inf and NaN, and change nothing if there is any.
        clip_to: Before groups are clipped, clip all scaled gradients together to this l2 norm, with
            a check; None: do not.
        clip_norm: Their l2 norm, unscaled, by which to clip; None: it is measured.
        clip_by_global_norm: Clip each group by the norm of all.
        loss_scale: Updated on its device by what `check` finds; None: there is none.
        unscale: If the step is not skipped, scaled gradients of these dtypes are unscaled in place.
        wait: Whether the host knows the outcome of a check when the step returns.
        warns: Warn of 16-bit parameters without masters, as a step by itself does.
        result: What became of the step; None until it is taken.
    """

    grads: Lists | None = None
    grads_of: Lists | None = None
    copies: Lists | None = None
    scale: float | Tensor = 1.0
    norms: list[float | Tensor | None] | None = None
    found_inf: Tensor | None = None
    check: bool = False
    clip_to: float | None = None
    clip_norm: Tensor | None = None
    clip_by_global_norm: bool = False
    loss_scale: DeviceScale | None = None
    unscale: Sequence[torch.dtype] = ()
    wait: bool = True
    warns: bool = False
    result: StepResult | None = None


def takes_scaled_step(optimizer: Any) -> bool:
    """Return whether `take` works, whatever was put around `step` of this object.

    A subclass with a `step` of its own takes no `ScaledStep`; nor does an object that returns the
    `step` of another one.
    """
    return getattr(getattr(type(optimizer), "step", None), "takes_scaled_step", False)


def take(optimizer: Any, step: ScaledStep, *args: Any, **kwargs: Any) -> Any:
    """Call `optimizer.step`, and whatever was put around it, with the attribute `scaled_step` set.

    Returns:
        What `optimizer.step` returned.
    """
    with handing(optimizer, step):
        return optimizer.step(*args, **kwargs)


@contextlib.contextmanager
def handing(optimizer: Any, step: ScaledStep) -> Iterator[None]:
    """A context in which `optimizer.step` is called, as by `take`."""
    optimizer.scaled_step = step
    try:
        yield
    finally:
        del optimizer.scaled_step


@contextlib.contextmanager
def dropping_amp_tensors(optimizer: Any) -> Iterator[None]:
    """A context in which an optimizer steps; an error removes what GradScaler has set on it."""
    try:
        yield
    except BaseException:
        drop_amp_tensors(optimizer)
        raise


def drop_amp_tensors(optimizer: Any) -> None:
    """Remove what torch's GradScaler has set on an optimizer, whose step has raised an error.

    torch removes both only after a step without an error, and multiplies the next scale by what it
    finds.
    """
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


@dataclasses.dataclass(frozen=True)
class HostOutcome:
    """An outcome in Python; see `Outcome`."""

    found_inf: bool
    norms: list[float] = dataclasses.field(default_factory=list)
    nonfinite_rows: list[int] = dataclasses.field(default_factory=list)
    is_known: bool = True


UNKNOWN = HostOutcome(False, is_known=False)


@dataclasses.dataclass(frozen=True, eq=False)
class GradCheck:
    """What a check of gradients has found before their step; on their device.

    Attributes:
        found_inf: One float32 number, not 0 if gradients hold inf or NaN; valid until the step.
        norm: l2 norm of all gradients, unscaled: 0-dim float64, valid until the step.
        dtypes: The dtypes of the gradients.
    """

    found_inf: Tensor
    norm: Tensor
    dtypes: Collection[torch.dtype]


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """What became of a `ScaledStep`.

    Attributes:
        outcome: The step's outcome.
        without_grad: Group and index of the parameters that had no gradient.
        grad_dtypes: The dtypes of the gradients; empty if there was none.
        found_inf: If the outcome is not known yet, one float32 number on the device that is not 0
            if the step was skipped, valid until the next step or check; else None.
        sent: If the outcome is not known yet, the tensor on the device that will hold it until the
            next step or check; else None.
        read: If the outcome is not known yet, makes it from a copy of `sent` on the CPU.
    """

    outcome: Outcome
    without_grad: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    grad_dtypes: Collection[torch.dtype] = ()
    found_inf: Tensor | None = None
    sent: Tensor | None = None
    read: Callable[[Tensor], Outcome] | None = None

    @classmethod
    def of_flag(cls, found_inf: Tensor) -> StepResult:
        """Return the result of a step that was given `found_inf`, one number on a device."""
        return cls(
            UNKNOWN,
            found_inf=found_inf,
            sent=found_inf.reshape(1),
            read=lambda values: HostOutcome(bool(values.any())),
        )

    def flag(self) -> Tensor:
        """Return one float32 number, not 0 if the step was skipped; see `found_inf`."""
        if self.found_inf is not None:
            return self.found_inf
        return torch.tensor(float(self.outcome.found_inf), dtype=torch.float32, device="cpu")

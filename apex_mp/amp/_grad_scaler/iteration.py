"""What has happened to an optimizer's gradients since the last update of a GradScaler."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils.hooks import RemovableHandle

from apex_mp import _C
from apex_mp.amp._grad_scaler.outcomes import ScaledSteps
from apex_mp.amp._stages import TABLE, Event, Stage, following
from apex_mp.core import readback, tensors
from apex_mp.core.log import warn
from apex_mp.grads.found_inf import clip_divisor
from apex_mp.grads.measured import Measured

# torch's name of a stage, if it is not READY; and the stage for torch's name.
_OF_TORCH = {
    Stage.UNSCALED: OptState.UNSCALED,
    Stage.MIXED: OptState.UNSCALED,
    Stage.STEPPED: OptState.STEPPED,
}
_FROM_TORCH = {
    OptState.READY: Stage.READY,
    OptState.UNSCALED: Stage.UNSCALED,
    OptState.STEPPED: Stage.STEPPED,
}
FLAGS = "found_inf_per_device"
_WITH_CLIP = {Stage.CLIPPED, Stage.EDITED, Stage.LATE}
_OF_BEFORE = {Stage.LATE, Stage.WAITING, Stage.SUMMED}  # Their gradients came before `update`.
WATCHING_BACKWARD = {Stage.UNSCALED, *_OF_BEFORE}
# An edit shows when one of these events comes.
_EDITABLE = {Stage.CLIPPED, Stage.LATE, Stage.WAITING}
_SHOWING_EDITS = {Event.CLIP, Event.UNSCALE, Event.STEP, Event.UPDATE}


@dataclasses.dataclass
class Clip:
    """A divisor, beside the loss scale, by which an optimizer's next step clips its gradients.

    Attributes:
        norm: Norm of the unscaled gradients: 0-dim.
        max_norm: Gradients of a larger norm are scaled down to this one.
        scale: The loss scale of the gradients: 0-dim.
        found_inf: If the optimizer clips by itself, one number that is not 0 if gradients hold inf
            or NaN; else None.
        divided_by: By what the step that was checked divides; None: none was. A plan knows it by
            its address, which another tensor must not get.
    """

    norm: Tensor
    max_norm: float
    scale: Tensor
    found_inf: Tensor | None = None
    divided_by: float | Tensor | None = None

    @functools.cached_property
    def divisor(self) -> Tensor:
        """By what gradients are to be divided beside the loss scale: 0-dim float32."""
        return clip_divisor(self.norm, self.max_norm).float()


class Iteration(dict[str, Any]):
    """What has happened to an optimizer's gradients since the last update.

    It is torch's dict of the optimizer: "stage" is torch's name of the stage, and
    "found_inf_per_device" has flags by device, not 0 if gradients there held inf or NaN.

    Args:
        optimizer: The optimizer; a weak reference is kept.

    Attributes:
        stage: What the gradients are.
        is_stepping: Whether the scaler steps the optimizer now.
        outcomes: The outcomes of its steps; None before the first.
        measured: What the last pass over the gradients has found, or None.
        noted: Norm and clip factor, for listeners of the step, or None.
        steps: How many steps the optimizer had taken when it got its flag from its own, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__({"stage": OptState.READY, FLAGS: {}})
        self.outcomes: ScaledSteps | None = None
        self.measured: Measured | None = None
        self.noted: tuple[Tensor, Tensor] | None = None
        self.steps: int | None = None
        self._optimizer = weakref.ref(optimizer)
        self.stage = Stage.READY
        self.is_stepping = False
        self._versions = _C.GradVersions()
        self._clip: Clip | None = None
        self._guard: RemovableHandle | None = None
        self._before: Tensor | None = None  # The scale before `update`, and the largest gradient.
        self._had_grads: Sequence[Tensor] = ()

    def enter(self, stage: Stage) -> None:
        """Go to a stage; a clip is forgotten where it has been used or has become void."""
        self.stage = stage
        self["stage"] = _OF_TORCH.get(stage, OptState.READY)
        if stage not in _OF_BEFORE:
            self._before, self._had_grads = None, ()
        if self._clip is not None and stage not in _WITH_CLIP:
            self._clip = None
            if self._guard is not None:
                self._guard.remove()

    def follow_torch(self) -> None:
        """Go to the stage of torch's "stage", if something else has written that."""
        if _OF_TORCH.get(self.stage, OptState.READY) is not self["stage"]:
            self.enter(_FROM_TORCH[self["stage"]])

    @property
    def clip(self) -> Clip | None:
        """What `clip_grad_norm_` has left to the step."""
        return self._clip if self.stage is Stage.CLIPPED else None

    @property
    def record(self) -> ScaledSteps:
        """The outcomes of the optimizer's steps; `GradScaler.step` has made them."""
        assert self.outcomes is not None
        return self.outcomes

    def after(self, event: Event) -> Stage:
        """Return the stage after an event; the stage is as before, but for an edit that shows."""
        stage = self.stage
        if event in _SHOWING_EDITS and stage in _EDITABLE and self._are_changed():
            stage = self.after(Event.EDIT)
            self.enter(stage)
        new = TABLE.get((stage, event), stage)
        if isinstance(new, Stage):
            return new
        return following(stage, event, owner=type(self._optimizer()).__name__)

    def _are_changed(self) -> bool:
        return self._versions.changed(self._params())

    def _params(self) -> list[Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else tensors.params_of(optimizer)

    def clip_in_step(self, clip: Clip) -> None:
        """Leave a clip to the next step, or to `unscale_`; until then no other may step."""
        optimizer = self._optimizer()
        assert optimizer is not None  # The caller has it.
        self._clip = clip
        self._versions.record(self._params())
        self._guard = optimizer.register_step_pre_hook(self._refuse_plain_step)
        # Last: if Ctrl-C interrupts a line above, the hook that is left behind refuses nothing.
        self.enter(Stage.CLIPPED)

    def _refuse_plain_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_stepping:
            return
        if self.stage is Stage.LATE and self._are_changed():
            self.enter(self.after(Event.EDIT))
        self.after(Event.PLAIN_STEP)

    # The scale of the gradients.

    def scale(self, present: Tensor) -> Tensor:
        """Return the scale of the gradients; warn if they are sums of two."""
        stage, before = self.stage, self._before
        if self._clip is not None:
            return self._clip.scale
        if stage not in _OF_BEFORE or before is None or readback.is_capturing():
            return present
        if stage is Stage.WAITING:
            return before[0]
        self.enter(Stage.READY)  # From here on they count as scaled by the present one.
        facts = torch.cat([before, tensors.copy_async(present, before.device).view(1)])
        if facts.is_cpu:
            self._warn_of_scales(facts)
        else:
            readback.submit_tensor(facts, self._warn_of_scales)
        return present

    def _warn_of_scales(self, facts: Tensor) -> None:
        before, largest_grad, now = facts.tolist()
        owner = type(self._optimizer()).__name__
        if before != now and largest_grad != 0.0:
            warn(
                f"GradScaler.step: gradients of {owner} are sums of two scales: scaler.update() "
                f"changed {before:g} to {now:g} between their backwards, and the step divides by "
                f"the last. Call update() when each optimizer has stepped, or give {owner} a "
                "GradScaler of its own",
                "gradients-of-two-scales",
            )

    def end(self, scale: Tensor, *, is_in_graph: bool) -> None:
        """End the iteration: `update` was called."""
        new = self.after(Event.UPDATE)
        stage = self.stage  # After an edit, if one has shown.
        if new in _OF_BEFORE:
            params = self._params()
            is_in_graph = is_in_graph or readback.is_capturing()
            if all(param.grad is None for param in params):
                new = Stage.READY
            elif is_in_graph:
                self._before = None
                new = Stage.READY if new is Stage.WAITING else new
            elif stage is Stage.SUMMED or stage not in _OF_BEFORE:
                self._note_before(params, scale)
                if new is Stage.WAITING and self._are_zero():
                    new = Stage.READY
        self.enter(new)
        self.measured = self.noted = self.steps = None
        self[FLAGS] = {}

    @torch.no_grad()  # Gradients may have a graph.
    def _note_before(self, params: list[Tensor], scale: Tensor) -> None:
        grads = [tensors.local_part(param.grad) for param in params if param.grad is not None]
        readable = [each for each in grads if each.numel() and tensors.not_readable(each) is None]
        # Loops that clear gradients to zero leave nothing of another scale.
        sizes = torch._foreach_norm(readable, math.inf) if readable else []
        largest = [tensors.copy_async(size.float(), scale.device) for size in sizes]
        # Of gradients that cannot be read the scale stands for the largest.
        before = torch.stack([scale, torch.stack(largest or [scale]).amax()])
        if self.stage is Stage.SUMMED and self._before is not None:
            # Of what was added to zeros the present scale is the only one.
            before = torch.where(self._before[1] == 0.0, before, self._before)
        self._before = before
        self._had_grads = [param for param in params if param.grad is not None]
        self._versions.record(params)

    def refuse_later_step(self) -> None:
        """Raise a RuntimeError if a later step has overwritten whether one was skipped."""
        optimizer: Any = None if self.steps is None else self._optimizer()
        if optimizer is not None and optimizer._own_masters.counts.steps != self.steps:
            raise RuntimeError(
                f"GradScaler.update: {type(optimizer).__name__} was stepped again after "
                "scaler.step(optimizer), without this scaler; call scaler.update() before that"
            )

    def _are_zero(self) -> bool:
        """Return whether gradients before `update` were 0, if the host knows without waiting."""
        before = self._before
        return before is not None and before.is_cpu and before[1].item() == 0.0

    # A backward of a scaled loss.

    def begin_backward(self) -> None:
        """Watch whether the backward that has begun gives gradients to the optimizer.

        Called in the stages `WATCHING_BACKWARD`.
        """
        if self.stage is not Stage.UNSCALED:
            # What has changed in between was cleared, or is the user's own.
            is_cleared = any(param.grad is None for param in self._had_grads)
            if is_cleared or self._are_changed():
                self.enter(self.after(Event.EDIT))
                return
        self._versions.record(self._params())
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._are_changed():
            self._versions.record(self._params())
            self.enter(self.after(Event.BACKWARD))

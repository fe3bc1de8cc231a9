"""What may happen to an optimizer's gradients, and in which order: one table.

A stage says what the gradients are. `TABLE` gives the next one for each pair of a stage and an
event, or the sentence by which the event is refused; where it has no row the stage stays.
`GradScaler` and `scale_loss` have it in common.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class Stage(enum.Enum):
    """What the gradients of an optimizer are."""

    READY = "scaled, or there are none"
    CLIPPED = "measured by `clip_grad_norm_`, and scaled until the step"
    EDITED = "written or replaced after `clip_grad_norm_`"
    LATE = "measured by `clip_grad_norm_`, and not stepped before `update`"
    WAITING = "not stepped before `update`, so that they have the scale of before"
    SUMMED = "sums of gradients of two scales"
    UNSCALED = "unscaled"
    MIXED = "unscaled, and a backward of a scaled loss has added to them"
    STEPPED = "stepped"
    IN_BLOCK = "of a block of `scale_loss` that is open"
    LEFT_SCALED = "left scaled by `scale_loss`: `delay_unscale`, or `no_sync`"


class Event(enum.Enum):
    """What happens to them; the first three are calls of the scaler's methods."""

    CLIP = "clip_grad_norm_"
    UNSCALE = "unscale_"
    STEP = "step"
    UPDATE = "update"
    BACKWARD = "backward"  # of a scaled loss; it has added to them, or made new ones
    EDIT = "edit"  # They were written or replaced, or set to None before another backward.
    PLAIN_STEP = "optimizer.step"  # not by the scaler
    BLOCK = "scale_loss"
    REPLAY = "replay"  # of a CUDA graph, which may have written them


@dataclasses.dataclass(frozen=True)
class Refused:
    """The sentence of a RuntimeError.

    It may name `{call}`, the method, `{owner}`, the optimizer's class, and `{scale}`, the scale.
    """

    text: str


_STILL_SCALED = Refused(
    "{owner}.step: the gradients are still scaled, because scaler.clip_grad_norm_(optimizer) "
    "leaves it to the step to unscale and clip them. Call scaler.step(optimizer) instead of "
    "optimizer.step()"
)
_EDITED = Refused(
    "GradScaler: gradients of {owner} were written or replaced after "
    "scaler.clip_grad_norm_(optimizer), which has measured them and left them scaled. Call it "
    "after the last backward(); to edit gradients, call scaler.unscale_(optimizer) before it; to "
    "leave out a step, call scaler.update()"
)
_LATE = Refused(
    "GradScaler: scaler.update() was called between scaler.clip_grad_norm_(optimizer) and the step "
    "of {owner}, whose gradients have the scale of before. Call clip_grad_norm_, step and update "
    "in this order"
)
_MIXED = Refused(
    "GradScaler.{call}: the gradients of {owner} were unscaled, and then a backward() of another "
    "scaled loss has added to them or made new ones. Unscale and clip after the last backward() "
    "of an iteration, and call scaler.update() at its end, also if the step is left out"
)
_TWO_CLIPS = Refused(
    "clip_grad_norm_() has already been called on this optimizer since the last update(). Call "
    "scaler.update() at the end of each iteration, also if the step is left out."
)
_CLIP_AFTER_STEP = Refused(
    "clip_grad_norm_() is being called after step(). Call it before step(), and update() at the "
    "end of each iteration."
)
_BLOCK_IN_BLOCK = Refused(
    "scale_loss was called inside a scale_loss block of the same optimizer; end the first block "
    "before the second, or add the losses up"
)
_STEP_IN_BLOCK = Refused(
    "step() was called inside a scale_loss block, where gradients are still scaled; call it after "
    "the block"
)
_STEP_OF_SCALED = Refused(
    "step() was called with gradients that are still scaled by {scale}: the last scale_loss had "
    "delay_unscale=True, or its model was in no_sync; before a step the last one must not"
)
# The next three are torch's.
_TWO_STEPS = Refused("step() has already been called since the last update().")
_TWICE_UNSCALED = Refused(
    "unscale_() has already been called on this optimizer since the last update()."
)
_UNSCALED_AFTER_STEP = Refused("unscale_() is being called after step().")

TABLE: Mapping[tuple[Stage, Event], Stage | Refused] = {
    **{
        (stage, event): following
        for stage in (Stage.READY, Stage.WAITING, Stage.SUMMED)
        for event, following in (
            (Event.CLIP, Stage.CLIPPED),
            (Event.UNSCALE, Stage.UNSCALED),
            (Event.STEP, Stage.STEPPED),
        )
    },
    (Stage.READY, Event.UPDATE): Stage.WAITING,
    (Stage.WAITING, Event.EDIT): Stage.READY,
    (Stage.WAITING, Event.BACKWARD): Stage.SUMMED,
    (Stage.SUMMED, Event.EDIT): Stage.READY,
    (Stage.CLIPPED, Event.CLIP): _TWO_CLIPS,
    (Stage.CLIPPED, Event.UNSCALE): Stage.UNSCALED,
    (Stage.CLIPPED, Event.STEP): Stage.STEPPED,
    (Stage.CLIPPED, Event.EDIT): Stage.EDITED,
    (Stage.CLIPPED, Event.UPDATE): Stage.LATE,
    **{
        (stage, event): refused
        for stage, refused in ((Stage.EDITED, _EDITED), (Stage.LATE, _LATE))
        for event in (Event.CLIP, Event.UNSCALE, Event.STEP)
    },
    **{
        (stage, Event.PLAIN_STEP): _STILL_SCALED
        for stage in (Stage.CLIPPED, Stage.EDITED, Stage.LATE)
    },
    (Stage.EDITED, Event.UPDATE): Stage.WAITING,
    (Stage.LATE, Event.EDIT): Stage.READY,
    (Stage.LATE, Event.REPLAY): Stage.READY,
    (Stage.LATE, Event.BACKWARD): Stage.SUMMED,
    (Stage.UNSCALED, Event.UNSCALE): _TWICE_UNSCALED,
    (Stage.UNSCALED, Event.STEP): Stage.STEPPED,
    (Stage.UNSCALED, Event.UPDATE): Stage.READY,
    (Stage.UNSCALED, Event.BACKWARD): Stage.MIXED,
    (Stage.MIXED, Event.CLIP): _MIXED,
    (Stage.MIXED, Event.UNSCALE): _TWICE_UNSCALED,
    (Stage.MIXED, Event.STEP): _MIXED,
    (Stage.MIXED, Event.UPDATE): Stage.READY,
    (Stage.STEPPED, Event.CLIP): _CLIP_AFTER_STEP,
    (Stage.STEPPED, Event.UNSCALE): _UNSCALED_AFTER_STEP,
    (Stage.STEPPED, Event.STEP): _TWO_STEPS,
    (Stage.STEPPED, Event.UPDATE): Stage.READY,
    (Stage.READY, Event.BLOCK): Stage.IN_BLOCK,
    (Stage.IN_BLOCK, Event.BLOCK): _BLOCK_IN_BLOCK,
    (Stage.IN_BLOCK, Event.PLAIN_STEP): _STEP_IN_BLOCK,
    (Stage.LEFT_SCALED, Event.BLOCK): Stage.IN_BLOCK,
    (Stage.LEFT_SCALED, Event.PLAIN_STEP): _STEP_OF_SCALED,
}


def following(stage: Stage, event: Event, **names: Any) -> Stage:
    """Return the stage after an event."""
    new = TABLE.get((stage, event), stage)
    if isinstance(new, Refused):
        raise RuntimeError(new.text.format(call=event.value, **names))
    return new

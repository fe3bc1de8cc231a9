"""Orders of calls of GradScaler and scale_loss, as rows; and trainings that make them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from fused_adam_cases import Unchanged, grad_for, make_params
from torch.amp.grad_scaler import OptState

from apex_mp import amp
from apex_mp.amp._scale_loss import block
from apex_mp.amp._stages import TABLE, Event, Refused, Stage
from apex_mp.core import readback

# A row has calls in their order, methods of the classes below, after an iteration of "backward step
# update zero". Behind "=" stand the calls of the same training without a scale, if they are others;
# behind "|" a warning; behind "!" the refusal of the last call. The scale doubles at each update.
OF_ALL = """
    backward step update zero backward step
    backward backward step
    backward double step
    backward replace step
    backward step update zero own plain
    backward unscale step update
    backward unscale double clip clip step
    backward unscale plain
    backward unscale update step              = backward unscale sixteenth half step
    backward unscale update zero backward step
    backward unscale backward update zero backward step
    backward unscale backward update step     = backward unscale sixteenth backward half step
    ahead backward later step
    backward update step
    backward update update unscale step
    backward update double step               = backward step
    backward update replace step
    backward replace update zero backward step
    backward update replace update step
    backward update zero backward step
    backward update zeros backward step
    zero update backward step
    backward step update zeros update backward step
    backward update backward step             = backward half backward step | of two scales
    backward update backward unscale step     = backward half backward unscale step | of two scales
    backward update backward update step      = backward half backward half step | of two scales
    backward update backward zero backward step
    backward update zeros backward update step
    backward unscale unscale                  ! unscale_() has already been called on this optimizer
    backward unscale backward clip            ! were unscaled, and then a backward()
    backward unscale backward unscale         ! unscale_() has already been called on this optimizer
    backward unscale backward step            ! were unscaled, and then a backward()
    backward unscale zero backward step       ! were unscaled, and then a backward()
    backward ahead unscale later step         ! were unscaled, and then a backward()
    backward step clip                        ! clip_grad_norm_() is being called after step()
    backward step unscale                     ! unscale_() is being called after step()
    backward step step                        ! step() has already been called since the last
"""
# With others `clip` is `unscale`, and more.
OF_FUSED = """
    backward clip step update zero backward clip step
    backward clip step update zero own plain
    inf clip step update own plain            = backward zero own plain
    backward clip unscale step update
    backward clip unscale plain
    backward clip update own plain
    backward clip update own clip step        = backward own sixteenth half clip step
    backward clip update replace clip step
    backward clip update replace update step  = backward replace step
    backward clip update zero backward step
    backward clip update zeros backward clip step
    backward clip update backward step        = backward half backward step | of two scales
    backward clip zero update backward step
    backward clip double update step          = backward double step
    backward clip double update backward step = backward double half backward step | of two scales
    backward clip backward update step        = backward backward step
    backward update clip step
    backward update backward clip step        = backward half backward clip step | of two scales
    backward clip plain                       ! the gradients are still scaled
    backward clip double plain                ! the gradients are still scaled
    backward clip update plain                ! the gradients are still scaled
    backward clip clip                        ! clip_grad_norm_() has already been called
    backward clip double clip                 ! were written or replaced after
    backward clip replace unscale             ! were written or replaced after
    backward clip double step                 ! were written or replaced after
    backward clip backward step               ! were written or replaced after
    backward clip zero backward step          ! were written or replaced after
    backward clip update clip                 ! update() was called between
    backward clip update unscale              ! update() was called between
    backward clip update step                 ! update() was called between
    backward clip update update step          ! update() was called between
"""
# A replay of a CUDA graph writes gradients; their versions stay.
OF_GRAPHS = """
    capture step update replay step update replay update replay step
    capture clip step update replay clip update replay clip step
"""
OF_SCALE_LOSS = """
    block plain zero block plain
    block block plain
    block delayed block plain
    delayed delayed block plain
    delayed zero plain
    delayed zero plain own plain
    open close block plain
    open block                                ! inside a scale_loss block of the same optimizer
    open delayed                              ! inside a scale_loss block of the same optimizer
    open plain                                ! step() was called inside a scale_loss block
    delayed open plain                        ! step() was called inside a scale_loss block
    delayed plain                             ! with gradients that are still scaled by
    block delayed plain                       ! with gradients that are still scaled by
    delayed block delayed plain               ! with gradients that are still scaled by
"""
EVENTS = {
    **dict.fromkeys(["backward", "inf", "later", "capture"], Event.BACKWARD),
    **dict.fromkeys(["own", "replace", "double", "zero", "zeros"], Event.EDIT),
    **dict.fromkeys(["open", "block", "delayed"], Event.BLOCK),
    **{"clip": Event.CLIP, "unscale": Event.UNSCALE, "step": Event.STEP, "update": Event.UPDATE},
    **{"plain": Event.PLAIN_STEP, "replay": Event.REPLAY},
}


class Row(NamedTuple):
    """Calls, those of a training without a scale, a warning, and the refusal of the last call."""

    calls: str
    plain: str
    warning: str
    refusal: str

    @classmethod
    def of(cls, line: str) -> Row:
        """Read a line of a list above."""
        rest, _, refusal = line.partition("!")
        rest, _, warning = rest.partition("|")
        calls, _, plain = rest.partition("=")
        # A refused call does nothing.
        plain = plain.strip() or " ".join(calls.split()[: -1 if refusal else None])
        return cls(calls.strip(), plain, warning.strip(), refusal.strip())


def rows(lines: str) -> list[Row]:
    return [Row.of(line) for line in lines.splitlines() if line.strip()]


# What a block leaves behind when it has ended.
AFTER_BLOCK = {"block": Stage.READY, "close": Stage.READY, "delayed": Stage.LEFT_SCALED}


def walk(calls: str) -> Iterator[tuple[str, Stage, Event | None, Stage | Refused]]:
    """Return each call with the stage before it, its event, and what the table says of them."""
    stage, is_empty, in_graph = Stage.READY, True, False
    for call in calls.split():
        event = EVENTS.get(call)
        if stage is Stage.CLIPPED and event is Event.BACKWARD:
            event = Event.EDIT  # It shows as such.
        if stage is Stage.LEFT_SCALED and event is Event.PLAIN_STEP and is_empty:
            stage = Stage.READY
        new = stage if event is None else TABLE.get((stage, event), stage)
        if isinstance(new, Stage):
            new = AFTER_BLOCK.get(call, new)
        if event in (Event.EDIT, Event.BACKWARD, Event.BLOCK):
            is_empty = call in ("zero", "zeros")
        in_graph = in_graph or call == "capture"
        if event is Event.UPDATE and (is_empty or (in_graph and new is Stage.WAITING)):
            new = Stage.READY  # Nothing waits, or the graph writes it anew.
        yield call, stage, event, new
        if isinstance(new, Stage):
            stage = new


class Loop:
    """A training without a scale; each method is a call of a row."""

    before, max_norm = "backward step update zero", 0.5

    def __init__(self, make: Any, device: torch.device) -> None:
        self.params = make_params(device, shapes=((5,), (4, 3)))
        self.optimizer = make(self.params)
        self.number = 0  # of the next gradients

    def run(self, calls: str) -> None:
        for call in calls.split():
            getattr(self, call)()

    def new_grads(self) -> list[torch.Tensor]:
        self.number += 1
        return [grad_for(param, self.number, index) for index, param in enumerate(self.params)]

    def loss(self) -> torch.Tensor:
        pairs = zip(self.params, self.new_grads(), strict=True)
        return sum((param * grad).sum() for param, grad in pairs)  # type: ignore[return-value]

    def grads(self) -> list[torch.Tensor]:
        return [param.grad for param in self.params if param.grad is not None]

    @property
    def scale(self) -> float:
        return 1.0

    def backward(self) -> None:
        self.loss().backward()

    def own(self, factor: float = 1.0) -> None:
        for param, grad in zip(self.params, self.new_grads(), strict=True):
            param.grad = grad * factor

    def replace(self) -> None:
        self.own(self.scale)

    def double(self, factor: float = 2.0) -> None:
        for grad in self.grads():
            grad.mul_(factor)

    def zero(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def zeros(self) -> None:
        self.zero(set_to_none=False)

    def ahead(self) -> None:
        self.later_loss = self.loss()

    def later(self) -> None:
        self.later_loss.backward()

    def clip(self) -> None:
        self.norm = torch.nn.utils.clip_grad_norm_(self.params, self.max_norm)

    def step(self) -> None:
        self.optimizer.step()

    def pass_(self) -> None:
        """Do what is nothing without a scale."""

    half = functools.partialmethod(double, 0.5)
    sixteenth = functools.partialmethod(double, 0.0625)
    plain, unscale, update, open, close = step, pass_, pass_, new_grads, pass_
    replay, block, delayed, capture = own, backward, backward, backward


class WithScaler(Loop):
    """A training with a GradScaler, beside that of a parameter which steps in each iteration."""

    def __init__(self, make: Any, device: torch.device, interval: int = 1) -> None:
        super().__init__(make, device)
        self.scaler = amp.GradScaler(device.type, init_scale=8.0, growth_interval=interval)
        self.other = torch.optim.SGD(make_params(device, shapes=[(1,)]), lr=0.1)
        self.shows = True  # The stage is that of the table.
        self.begin()

    def begin(self) -> None:
        self.other.zero_grad()
        self.scaler.scale(self.other.param_groups[0]["params"][0]).backward()

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def loss(self) -> torch.Tensor:
        return self.scaler.scale(super().loss())  # type: ignore[no-any-return]

    def zero(self, set_to_none: bool = True) -> None:
        super().zero(set_to_none)
        self.shows = self.shows and set_to_none  # On a GPU the host does not know of zeros.

    def inf(self) -> None:
        self.backward()
        self.double(float("inf"))

    def capture(self) -> None:
        with mock.patch.object(readback, "is_capturing", return_value=True):
            self.backward()

    def replay(self) -> None:
        for old, new in zip(self.grads(), self.new_grads(), strict=True):
            new *= self.scale
            ctypes.memmove(old.data_ptr(), new.data_ptr(), new.nbytes)

    def clip(self) -> None:
        self.norm = self.scaler.clip_grad_norm_(self.optimizer, self.max_norm)

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.step(self.other)
        self.scaler.update()
        self.begin()

    def check(self, event: Event | None, stage: Stage) -> None:
        """Demand a stage, and torch's name of it; an edit shows later."""
        if event in (None, Event.EDIT, Event.REPLAY) or stage is Stage.EDITED or not self.shows:
            return
        found = self.scaler._iterations[self.optimizer].stage
        assert found is stage, f"after {event}: {found}, not {stage}"
        unscaled = {Stage.UNSCALED: OptState.UNSCALED, Stage.MIXED: OptState.UNSCALED}
        name = {Stage.STEPPED: OptState.STEPPED, **unscaled}.get(stage, OptState.READY)
        assert self.scaler._per_optimizer_states[id(self.optimizer)]["stage"] is name


class WithBlocks(Loop):
    """A training with `scale_loss`, whose scale doubles before each block."""

    before = "block plain zero"

    def __init__(self, make: Any, device: torch.device) -> None:
        super().__init__(make, device)
        self.scaler = amp.init(device_type=device.type)._default_scaler
        self.opened = contextlib.ExitStack()

    @property
    def scale(self) -> float:
        return self.optimizer._amp_step_guard.scaled_by or 0.0

    def check(self, event: Event | None, stage: Stage) -> None:
        """Do nothing: only refusals show the stage."""

    def enter(self, **options: bool) -> Any:
        return block.scaled_backward(self.loss(), [self.optimizer], self.scaler, **options)

    def block(self, **options: bool) -> None:
        self.scaler._loss_scale *= 2.0
        with self.enter(**options) as scaled_loss:
            scaled_loss.backward()

    def delayed(self) -> None:
        self.block(delay_unscale=True)

    def open(self) -> None:
        self.opened.enter_context(self.enter())

    def close(self) -> None:
        self.opened.close()


def carry_out(row: Row, ours: Any, plain: Loop, first: str = "unscale") -> None:
    """Make the calls of a row, with a scale and without one; `first` is for its first unscale."""
    ours.run(ours.before)
    plain.run(ours.before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spelled = row.calls.replace("unscale", first, 1).split()
        for call, (_, _, event, new) in zip(spelled, walk(row.calls), strict=True):
            if isinstance(new, Refused):
                demand_refusal(ours, call, event, new, row.refusal)
            else:
                getattr(ours, call)()
                ours.check(event, new)
        readback.wait()  # On a GPU the numbers of a warning are on their way.
    assert isinstance(new, Refused) == bool(row.refusal)
    assert {each.filename for each in caught} <= {__file__}
    (message,) = [str(each.message) for each in caught] or [""]
    assert row.warning in message
    assert bool(row.warning) == bool(message)
    plain.run(row.plain.replace("unscale", first, 1))
    if row.refusal:  # What the sentences ask for.
        plain.number = ours.number
        ours.run("close zero update " + ours.before)
        plain.run("zero " + ours.before)
    is_exact = "clip" not in (*row.plain.split(), first)
    for param, wanted in zip(ours.params, plain.params, strict=True):
        torch.testing.assert_close(param, wanted, **(EXACTLY if is_exact else CLIPPED))


EXACTLY, CLIPPED = {"rtol": 0.0, "atol": 0.0}, {"rtol": 1e-6, "atol": 1e-6}


def demand_refusal(ours: Any, call: str, event: Any, refused: Refused, words: str) -> None:
    names = {"owner": type(ours.optimizer).__name__, "scale": ours.scale}
    with Unchanged(ours.optimizer, ours.grads()):
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                getattr(ours, call)()
            assert str(caught.value) == refused.text.format(call=event.value, **names)
    assert words in str(caught.value)

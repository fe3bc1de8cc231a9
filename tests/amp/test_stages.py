"""The orders of calls of GradScaler and scale_loss: which train, and which are refused."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import random
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from fused_adam_cases import Unchanged, grad_for, make_params
from grad_scaler_cases import OF_TORCH, OURS, new_scaler
from torch.amp.grad_scaler import OptState

from apex_mp import amp
from apex_mp.amp._grad_scaler.iteration import Iteration
from apex_mp.amp._scale_loss import block
from apex_mp.amp._stages import TABLE, Event, Refused, Stage
from apex_mp.core import readback

PAGE = Path(__file__).parents[2] / "docs" / "how_it_works.md"
pytestmark = pytest.mark.usefixtures("amp_off")

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
        self.device = device
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

    def replay(self) -> None:
        self.own()

    def double(self, factor: float = 2.0) -> None:
        for grad in self.grads():
            grad.mul_(factor)

    def half(self) -> None:
        self.double(0.5)

    def sixteenth(self) -> None:
        self.double(0.0625)

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def zeros(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

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

    plain, unscale, update, open, close = step, pass_, pass_, new_grads, pass_
    block = delayed = capture = backward


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

    def zeros(self) -> None:
        super().zeros()
        self.shows = False  # On a GPU the host does not know that they are 0.

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
        assert self.scaler._iterations[self.optimizer].stage is stage
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


MAKES = {**OURS, **OF_TORCH}
FUSED = {*OURS, "AdamW fused"}
KINDS = {name: MAKES[name] for name in ("FusedAdam", "AdamW fused", "SGD")}


def cases() -> Iterator[Any]:
    for name, make in KINDS.items():
        for row in rows(OF_ALL + OF_FUSED * (name in FUSED)):
            yield pytest.param(make, row, "unscale", id=f"{name}: {row.calls}")
        for row in rows(OF_GRAPHS) if name in FUSED else ():
            case = pytest.param(make, row, "unscale", id=f"{name}: {row.calls}")
            yield pytest.param(*case.values, id=case.id, marks=pytest.mark.cpu_only)
        for row in () if name in FUSED else rows(OF_ALL):
            if "unscale" in row.calls.split()[:-1]:
                yield pytest.param(make, row, "clip", id=f"{name}: {row.calls}, by a clip")


@pytest.mark.every_case
@pytest.mark.parametrize(("make", "row", "first"), [*cases()])
def test_a_training_with_a_grad_scaler_is_that_without_a_scale_or_is_refused(
    make: Any, row: Row, first: str, device: torch.device
) -> None:
    carry_out(row, WithScaler(make, device), Loop(make, device), first)


@pytest.mark.parametrize("make", KINDS.values(), ids=[*KINDS])
@pytest.mark.parametrize("row", rows(OF_SCALE_LOSS), ids=lambda row: row.calls)
def test_so_is_one_with_scale_loss(make: Any, row: Row, device: torch.device) -> None:
    carry_out(row, WithBlocks(make, device), Loop(make, device))


def test_every_row_of_the_table_is_one_of_these() -> None:
    every = rows(OF_ALL + OF_FUSED + OF_GRAPHS + OF_SCALE_LOSS)
    met = {(stage, event) for row in every for _, stage, event, _ in walk(row.calls)}
    assert TABLE.keys() - met == set()


def random_calls(rng: random.Random, words: list[str]) -> str:
    """Return calls that the table allows; what was stepped or unscaled is cleared."""
    calls, has_grads = "", False
    while len(calls) < 400:
        call = rng.choice(words)
        *_, (_, stage, _, new) = walk(f"{calls} {call}")
        gives = call in ("backward", "replace")
        is_wrong = isinstance(new, Refused) or new in (Stage.SUMMED, Stage.MIXED, Stage.EDITED)
        if is_wrong or not (gives or has_grads or call in ("zero", "update")):
            continue
        if stage in (Stage.STEPPED, Stage.UNSCALED) and gives:
            continue
        is_used = call == "update" and stage in (Stage.STEPPED, Stage.UNSCALED)
        calls += f" {call} zero" if is_used else f" {call}"
        has_grads = not is_used and call != "zero" and (gives or has_grads)
    return calls


@pytest.mark.parametrize("make", MAKES.values(), ids=[*MAKES])
@pytest.mark.parametrize("seed", range(20))
def test_any_calls_that_the_table_allows_train_as_without_a_scale(
    seed: int, make: Any, device: torch.device
) -> None:
    words = ["backward", "replace", "zero", "unscale", "step", "update", "clip"]
    is_fused = make in (*OURS.values(), MAKES["AdamW fused"])
    calls = random_calls(random.Random(seed), words if is_fused else words[:-1])
    ours, plain = WithScaler(make, device), Loop(make, device)
    ours.max_norm = plain.max_norm = math.inf  # Clipping rounds otherwise than torch's.
    for each in (ours, plain):
        each.run(f"{each.before} {calls}")
    for param, wanted in zip(ours.params, plain.params, strict=True):
        assert torch.equal(param, wanted)


@pytest.mark.parametrize("knows", [pytest.param(True, marks=pytest.mark.cpu_only), False])
@pytest.mark.parametrize("calls", ["backward update step", "backward update backward step"])
def test_zeros_wait_only_if_the_host_does_not_know_of_them(
    calls: str, knows: bool, device: torch.device
) -> None:
    """On a GPU `update` does not wait to learn that gradients are 0."""
    is_sum = not knows or calls.count("backward") == 2
    plain = f"backward zeros {calls.replace('update', 'half') if is_sum else calls}"
    row = Row(f"backward zeros update {calls}", plain, "of two scales" * is_sum, "")
    ours, theirs = WithScaler(MAKES["SGD"], device), Loop(MAKES["SGD"], device)
    hidden = mock.patch.object(Iteration, "_are_zero", return_value=False)
    with contextlib.nullcontext() if knows else hidden:
        carry_out(row, ours, theirs)


def test_sums_of_two_equal_scales_are_no_reason_to_warn(device: torch.device) -> None:
    row = Row.of("backward update backward step")
    carry_out(row, WithScaler(MAKES["SGD"], device, interval=100), Loop(MAKES["SGD"], device))


def test_the_page_shows_the_table() -> None:
    lines = ["| stage | gradients are | " + " | ".join(f"`{each.value}`" for each in Event) + " |"]
    lines.append("|" + "---|" * (2 + len(Event)))
    for stage in Stage:
        cells = [stage.name, stage.value]
        for event in Event:
            new = TABLE.get((stage, event), stage)
            text = "" if new is stage else getattr(new, "name", "refused")
            cells.append(text)
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))
    assert "\n".join(lines) in PAGE.read_text()


def test_every_refusal_names_the_optimizer_or_the_method() -> None:
    for (_, event), new in TABLE.items():
        if isinstance(new, Refused):
            sentence = new.text.format(call=event.value, owner="Adam", scale=8.0)
            assert "Adam" in sentence or event.value.split(".")[-1] in sentence


@pytest.mark.parametrize("make", KINDS.values(), ids=[*KINDS])
def test_unscaling_and_stepping_twice_are_refused_with_the_sentences_of_torch(
    make: Any, device: torch.device
) -> None:
    messages: list[list[str]] = []
    for cls in (amp.GradScaler, torch.amp.GradScaler):
        loop = WithScaler(make, device)
        loop.scaler = new_scaler(device, cls)
        loop.run("backward unscale")
        messages.append([])
        for calls in ("unscale", "step step", "unscale"):
            with pytest.raises(RuntimeError) as caught:
                loop.run(calls)
            messages[-1].append(str(caught.value))
    assert messages[0] == messages[1]


def test_what_a_subclass_writes_into_the_dict_of_torch_counts(device: torch.device) -> None:
    """As Composer's scaler, which makes an optimizer READY once more."""
    loop = WithScaler(MAKES["SGD"], device)
    states = loop.scaler._per_optimizer_states
    states[id(loop.optimizer)]["stage"] = OptState.READY
    loop.run("backward unscale")
    states[id(loop.optimizer)]["stage"] = OptState.READY
    grads = [grad / 8.0 for grad in loop.grads()]
    loop.unscale()
    assert all(map(torch.equal, loop.grads(), grads))
    states[id(loop.optimizer)]["stage"] = OptState.STEPPED
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        loop.step()


def test_a_parameter_that_was_replaced_is_freed_though_its_gradient_has_waited(
    device: torch.device,
) -> None:
    loop = WithScaler(MAKES["SGD"], device)
    loop.run("backward step update zero backward update update zero backward step update")
    alive = weakref.ref(loop.params.pop())
    loop.optimizer.state.pop(loop.optimizer.param_groups[0]["params"].pop())
    gc.collect()
    assert alive() is None

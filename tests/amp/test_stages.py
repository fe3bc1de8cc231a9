"""The orders of calls of GradScaler and scale_loss: which train, and which are refused."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from grad_scaler_cases import OF_TORCH, OURS, new_scaler
from stage_cases import (
    OF_ALL,
    OF_FUSED,
    OF_GRAPHS,
    OF_SCALE_LOSS,
    Loop,
    Row,
    WithBlocks,
    WithScaler,
    carry_out,
    rows,
    walk,
)
from torch.amp.grad_scaler import OptState

from apex_mp import amp
from apex_mp.amp._grad_scaler.iteration import Iteration
from apex_mp.amp._stages import TABLE, Event, Refused, Stage

PAGE = Path(__file__).parents[2] / "docs" / "how_it_works.md"
pytestmark = pytest.mark.usefixtures("amp_off")

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

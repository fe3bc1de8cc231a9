"""torch.distributed.checkpoint saves and loads optimizers, with their masters and loss scales."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cases import INF, assert_same
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from way_runs import Run
from ways import WAYS, Twin, Way, train

import apex_mp
from apex_mp import optimizers
from apex_mp.masters.joined import differ
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off", "one_process")]


CASES = [
    way
    for way in WAYS
    if way.has("torch's interface") and way.store != "host"
    if "narrow" not in way.inner  # Moments are float32 until the next step.
]
each_way = pytest.mark.parametrize("way", CASES, ids=str)
CPU = torch.device("cpu")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def save(run: Run, folder: Path, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Save model and optimizer; return the state of the scale, which is beside them."""
    run.zero_grad()
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    checkpoint.save({"model": model, "optim": optim}, checkpoint_id=folder)
    others = {
        name: part for name, part in run.parts().items() if name not in ("model", "optimizer")
    }
    return {name: copy.deepcopy(part.state_dict()) for name, part in others.items()}


def load(
    run: Run, folder: Path, scale: dict[str, Any], options: StateDictOptions | None = None
) -> None:
    run.zero_grad()
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    checkpoint.load({"model": model, "optim": optim}, checkpoint_id=folder)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=model,
        optim_state_dict=optim,
        options=options,
    )
    for name, state in scale.items():
        run.parts()[name].load_state_dict(state)


@each_way
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("steps", [0, 2], ids=["into a new run", "into a trained run"])
def test_a_run_that_was_saved_goes_on_with_the_same_bits(
    way: Way, flat: bool, steps: int, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    run = way.start(CPU)
    train(run, None, [None, INF, None, None, None])
    scale = save(run, tmp_path, options)
    other = way.start(CPU)
    train(other, None, [None] * steps)
    load(other, tmp_path, scale, options)
    expected = run.numbers()
    assert_same(other.numbers(), expected)
    train(other, None, [None, INF, None], first=5)
    wanted = Twin(run)
    resumed = other.numbers()
    load(run, tmp_path, scale, options)
    train(run, None, [None, INF, None], first=5)
    assert_same(run.numbers(), resumed)
    assert not all(map(torch.equal, run.masters(), wanted.params))


# Elsewhere torch makes missing state itself by a step, after which the count is 1, momentum is
# dampened, and FusedAdagrad has added up the decay.
BEFORE_A_STEP = [
    way
    for way in CASES
    if way.store in ("own", "O2") or way.api == "OptimWrapper"
    if way.inner not in ("FusedSGD", "FusedAdagrad")
]


@pytest.mark.parametrize("steps", [0, 2], ids=["into a new run", "into a trained run"])
@pytest.mark.parametrize("skipped", [0, 2], ids=["no step", "steps skipped"])
@pytest.mark.parametrize("way", BEFORE_A_STEP, ids=str)
def test_a_run_that_was_saved_before_its_first_step_goes_on_with_the_same_bits(
    way: Way, skipped: int, steps: int, tmp_path: Path
) -> None:
    run = way.start(CPU)
    train(run, None, [INF] * skipped)
    scale = save(run, tmp_path)
    other = way.start(CPU)
    train(other, None, [None] * steps)
    load(other, tmp_path, scale)
    expected = Twin(way.start(CPU))
    for each in (run, other):
        twin = copy.deepcopy(expected)
        train(each, twin, [None, INF, None])
        twin.assert_is(each)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (FusedAdam, {}),
        (FusedSGD, {"momentum": 0.9}),
        (FusedLAMB, {}),
        (FusedNovoGrad, {}),
        (FusedAdagrad, {}),
    ],
)
def test_asking_a_fused_optimizer_for_its_state_counts_no_step(cls: Any, options: Any) -> None:
    runs = []
    for asks in (False, True):
        torch.manual_seed(0)
        model = net().half()
        optimizer = cls(model.parameters(), lr=0.1, master_weights=True, **options)
        if asks:
            saved = get_optimizer_state_dict(model, optimizer)
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved))
        for step in range(3):
            for param in model.parameters():
                param.grad = torch.full_like(param, 1.0 + step)
            optimizer.step()
        runs.append([state for param in model.parameters() for state in [optimizer.state[param]]])
    for one, other in zip(*runs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


NADAM, SGD = torch.optim.NAdam, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MasterWeights: Any = optimizers.MasterWeights
# The same optimizer without masters and with them.
BOTH: dict[str, tuple[Any, Any]] = {
    "FusedAdam": (FusedAdam, functools.partial(FusedAdam, master_weights=True)),
    "torch's AdamW": (
        functools.partial(torch.optim.AdamW, weight_decay=0.0),
        functools.partial(FusedAdam, master_weights="float32"),
    ),
    "NAdam": (NADAM, functools.partial(MasterWeights, optimizer_class=NADAM)),
    "SGD": (SGD, lambda params: MasterWeights(params, torch.optim.SGD, lr=0.1, momentum=0.9)),
}


def steps(model: nn.Module, optimizer: Any, count: int) -> None:
    for step in range(count):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5 + step)
        optimizer.step()


@pytest.mark.parametrize("taken", [0, 2], ids=["into a new run", "into a trained run"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("gets_masters", [True, False])
def test_a_run_goes_on_with_masters_or_without(
    gets_masters: bool, name: str, flat: bool, taken: int, tmp_path: Path
) -> None:
    makers = BOTH[name] if gets_masters else BOTH[name][::-1]
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = net().bfloat16()
    optimizer = makers[0](model.parameters())
    steps(model, optimizer, 3)
    saved = dict(
        zip(("model", "optim"), get_state_dict(model, optimizer, options=options), strict=True)
    )
    checkpoint.save(saved, checkpoint_id=tmp_path)
    other = net().bfloat16()
    goes_on = makers[1](other.parameters())
    steps(other, goes_on, taken)
    loaded = dict(
        zip(("model", "optim"), get_state_dict(other, goes_on, options=options), strict=True)
    )
    planner = checkpoint.DefaultLoadPlanner(allow_partial_load=True)
    checkpoint.load(loaded, checkpoint_id=tmp_path, planner=planner)
    set_state_dict(
        other,
        goes_on,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optim"],
        options=options,
    )
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    if gets_masters:
        for param in other.parameters():
            assert not differ(goes_on.master(param), param).any()
    twin, of_twin = copy.deepcopy((model, optimizer))
    steps(other, goes_on, 1)
    steps(twin, of_twin, 1)
    for one, expected in zip(other.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, expected, rtol=2.0**-6, atol=2.0**-8)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, NADAM])
@pytest.mark.parametrize("saved_in_block", [False, True])
def test_a_script_loads_what_it_has_saved_without_masters_or_with(
    saved_in_block: bool, kind: Any, tmp_path: Path
) -> None:
    def run(in_block: bool) -> tuple[nn.Module, Any]:
        model = net().bfloat16()
        optimizer = kind(model.parameters())
        assert isinstance(optimizer, MasterWeights) == in_block
        return model, optimizer

    in_block = [apex_mp.use_master_weights, contextlib.nullcontext]
    with in_block[not saved_in_block]():
        model, optimizer = run(saved_in_block)
        steps(model, optimizer, 2)
        saved = get_state_dict(model, optimizer)
        checkpoint.save({"model": saved[0], "optim": saved[1]}, checkpoint_id=tmp_path)
    with in_block[saved_in_block]():
        other, goes_on = run(not saved_in_block)
        of_model, of_optimizer = get_state_dict(other, goes_on)
        loaded = {"model": of_model, "optim": of_optimizer}
        checkpoint.load(loaded, checkpoint_id=tmp_path)
        set_state_dict(other, goes_on, model_state_dict=of_model, optim_state_dict=loaded["optim"])
        steps(other, goes_on, 1)
    assert all(map(torch.isfinite, (param.sum() for param in other.parameters())))
    twin, of_twin = copy.deepcopy((model, optimizer))
    steps(twin, of_twin, 1)
    for one, expected in zip(other.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, expected, rtol=2.0**-6, atol=2.0**-8)


@pytest.mark.parametrize("way", [way for way in WAYS if way.store == "own"], ids=str)
def test_saved_masters_do_not_change_with_the_run(way: Way) -> None:
    run = way.start(CPU)
    train(run, None, [None])
    saved = get_optimizer_state_dict(run.model, run.optimizer)["state"]
    masters = [each["master_param"] for each in saved.values() if "master_param" in each]
    before = copy.deepcopy(masters)
    assert before
    train(run, None, [None, None], first=1)
    assert all(map(torch.equal, masters, before))


def test_asking_a_new_optimizer_for_its_state_takes_no_step() -> None:
    run = Way("optimizers", "own", "FusedAdam").start(CPU)
    before = run.numbers()
    optim = get_optimizer_state_dict(run.model, run.optimizer)
    assert set(optim["state"]["a"]) == {"exp_avg", "exp_avg_sq", "step", "master_param"}
    assert_same(run.numbers(), before)
    assert run.optimizer.cur_iter == 0
    assert run.inner.state == {}
    assert run.optimizer.param_groups[0]["lr"] == 0.01

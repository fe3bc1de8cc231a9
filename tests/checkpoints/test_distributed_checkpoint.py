"""torch.distributed.checkpoint saves and loads optimizers, with their masters and loss scales."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cases import INF
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import apex_mp
from apex_mp import amp, fp16_utils, optimizers
from apex_mp.masters.joined import differ
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apex_mp.parallel.LARC import LARC

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off", "one_process")]


# A model, an optimizer of it, and what takes the loss.
Run = tuple[nn.Module, Any, Callable[[Tensor], Any]]
SCALE = {"init_scale": 2.0**10, "scale_window": 3}


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def plain(make: Any, dtype: torch.dtype = torch.float32) -> Run:
    model = net().to(dtype)
    return model, make(model.parameters()), lambda loss: loss.backward()


def fp16(face: Any, make: Any) -> Run:
    model = net().half()
    model[1].float()  # type: ignore[operator]
    model[0].bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    optimizer = face(
        make(model.parameters()), dynamic_loss_scale=True, dynamic_loss_args=SCALE, verbose=False
    )
    return model, optimizer, optimizer.backward


def larc_around_fp16(face: Any) -> Run:
    model, optimizer, backward = fp16(face, sgd)
    return model, LARC(optimizer), backward


def wrapped() -> Run:
    handle: Any = amp.casts.current.handle or amp.init(device_type="cpu")
    model = net()
    optimizer = handle.wrap_optimizer(FusedAdam(model.parameters(), lr=0.1))
    optimizer._loss_scaler[0]._loss_scale = 2.0**10

    def backward(loss: Tensor) -> None:
        with optimizer.scale_loss(loss) as scaled_loss:
            scaled_loss.backward()

    return model, optimizer, backward


def at_o2(make: Any) -> Run:
    model = net()
    optimizer = make(model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0
    )

    def backward(loss: Tensor) -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    return model, optimizer, backward


RUNS: dict[str, Callable[[], Run]] = {
    "FusedAdam": lambda: plain(FusedAdam),
    "FusedAdam with masters": lambda: plain(
        lambda params: FusedAdam(params, master_weights=True), torch.float16
    ),
    "FusedSGD": lambda: plain(lambda params: FusedSGD(params, lr=0.1, momentum=0.9)),
    "LARC": lambda: plain(lambda params: LARC(sgd(params))),
    "fp16_utils.FP16_Optimizer": lambda: fp16(fp16_utils.FP16_Optimizer, torch.optim.AdamW),
    "optimizers.FP16_Optimizer": lambda: fp16(optimizers.FP16_Optimizer, FusedAdam),
    "LARC around FP16_Optimizer": lambda: larc_around_fp16(optimizers.FP16_Optimizer),
    "OptimWrapper": wrapped,
    "O2": lambda: at_o2(FusedAdam),
    "LARC at O2": lambda: at_o2(lambda params: LARC(sgd(params))),
}
# Here torch makes missing state itself, and the step count is 1 afterwards.
PLAIN = ("FusedAdam", "FusedAdam with masters", "FusedSGD", "LARC")
every_run = pytest.mark.parametrize("make", RUNS.values(), ids=RUNS.keys())


def begin(make: Callable[[], Run], seed: int, steps: int) -> Run:
    torch.manual_seed(seed)
    run = make()
    train(run, steps)
    return run


def train(run: Run, steps: int, factor: float = 1.0) -> None:
    """Take steps; with a factor of inf each is skipped."""
    model, optimizer, backward = run
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step)).to(dtype)
        h = model[0](x)  # type: ignore[index]
        h = model[1](h.to(model[1].weight.dtype)).to(dtype)  # type: ignore[index]
        backward(model[2](h).float().square().sum() * factor)  # type: ignore[index]
        optimizer.step()


def everything(run: Run) -> list[Tensor]:
    """The weights, what the optimizer steps, and the loss scale."""
    model, optimizer, _ = run
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    scale = [getattr(optimizer, "loss_scale", 1.0)]
    if isinstance(optimizer, amp.OptimWrapper):
        scale = [*optimizer._loss_scaler[0].state_dict().values()]
    return [*(each.detach().clone() for each in (*model.parameters(), *stepped)), Tensor(scale)]


@every_run
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("steps", [0, 2], ids=["into a new run", "into a trained run"])
def test_a_run_that_was_saved_goes_on_with_the_same_bits(
    make: Callable[[], Run], flat: bool, steps: int, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    run = begin(make, 7, 5)
    model, optim = get_state_dict(*run[:2], options=options)
    checkpoint.save({"model": model, "optim": optim}, checkpoint_id=tmp_path)
    train(run, 4)

    other = begin(make, 8, steps)
    loaded: dict[str, Any] = dict(
        zip(("model", "optim"), get_state_dict(*other[:2], options=options), strict=True)
    )
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(
        *other[:2],
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optim"],
        options=options,
    )
    train(other, 4)
    assert all(map(torch.equal, everything(run), everything(other)))


@pytest.mark.parametrize("steps", [0, 2], ids=["into a new run", "into a trained run"])
@pytest.mark.parametrize("skipped", [0, 2], ids=["no step", "steps skipped"])
@pytest.mark.parametrize("name", [name for name in RUNS if name not in PLAIN])
def test_a_run_that_was_saved_before_its_first_step_goes_on_with_the_same_bits(
    name: str, skipped: int, steps: int, tmp_path: Path
) -> None:
    expected, run = begin(RUNS[name], 7, 0), begin(RUNS[name], 7, 0)
    for each in (expected, run):
        train(each, skipped, INF)
    model, optim = get_state_dict(*run[:2])
    checkpoint.save({"model": model, "optim": optim}, checkpoint_id=tmp_path)

    other = begin(RUNS[name], 8, steps)
    loaded: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(*other[:2]), strict=True))
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(*other[:2], model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    for each in (expected, run, other):
        train(each, 4)
    assert all(map(torch.equal, everything(run), everything(expected)))
    assert all(map(torch.equal, everything(other), everything(expected)))


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


@pytest.mark.parametrize("name", [name for name in RUNS if "FP16_Optimizer" in name])
def test_saved_masters_do_not_change_with_the_run(name: str) -> None:
    run = begin(RUNS[name], 7, 3)
    saved = get_optimizer_state_dict(*run[:2])["state"]
    masters = [each["master_param"] for each in saved.values() if "master_param" in each]
    before = copy.deepcopy(masters)
    assert before
    train(run, 2)
    assert all(map(torch.equal, masters, before))


def test_asking_a_new_optimizer_for_its_state_takes_no_step() -> None:
    run = begin(RUNS["optimizers.FP16_Optimizer"], 7, 0)
    before = everything(run)
    optim = get_optimizer_state_dict(*run[:2])
    assert set(optim["state"]["2.weight"]) == {"exp_avg", "exp_avg_sq", "step", "master_param"}
    assert all(map(torch.equal, everything(run), before))
    assert run[1].cur_iter == 0
    assert run[1].optimizer.state == {}
    assert run[1].param_groups[0]["lr"] == 1e-3

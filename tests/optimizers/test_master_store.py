"""Masters are there when they are asked for, of all parameters in groups and of nothing else."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerances import assert_same_bits
from torch import Tensor, nn
from torch.nn import Parameter

from apex_mp import AveragedMasters, convert
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam, FusedSGD, MasterWeights

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KINDS: dict[str, Callable[[Any], Any]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=2.0**-6, master_weights=True),
    "FusedAdam, split": lambda params: FusedAdam(params, lr=2.0**-6, master_weights="split"),
    "FusedSGD": lambda params: FusedSGD(params, lr=2.0**-6, master_weights=True),
    "MasterWeights(AdamW)": lambda params: MasterWeights(params, torch.optim.AdamW, lr=2.0**-6),
    "MasterWeights(RMSprop)": lambda params: MasterWeights(
        params, torch.optim.RMSprop, lr=2.0**-6, master_weights="split"
    ),
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=[*KINDS])


def steps(optimizer: Any, params: list[Parameter], count: int = 1) -> None:
    for _ in range(count):
        for param in params:
            param.grad = torch.full_like(param, 0.125)
        optimizer.step()


@each_kind
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_float32_checkpoint_is_loaded_without_rounding_before_the_first_step(
    make: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    source = nn.Linear(5, 7)
    model = nn.Linear(5, 7).to(dtype)
    optimizer = make(model.parameters())
    assert_same_bits(optimizer.master(model.weight), model.weight.detach().float())
    convert.load(model, source.state_dict(), optimizer)
    params = [*model.parameters()]
    averaged = AveragedMasters(model, optimizer)
    loaded, twin = copy.deepcopy((model, optimizer))
    fresh = make(loaded.parameters())
    fresh.load_state_dict(optimizer.state_dict())
    for name, param in model.named_parameters():
        expected = source.get_parameter(name).detach()
        torch.testing.assert_close(optimizer.master(param), expected, rtol=0, atol=2.0**-30)
        for other in (
            convert.masters(model, optimizer)[name],
            averaged.module.get_parameter(name).detach(),
            fresh.master(loaded.get_parameter(name)),
            twin.master(loaded.get_parameter(name)),
        ):
            assert_same_bits(other, optimizer.master(param))
    steps(optimizer, params, 2)
    steps(fresh, [*loaded.parameters()], 2)
    for param, other in zip(params, loaded.parameters(), strict=True):
        assert_same_bits(fresh.master(other), optimizer.master(param))


@each_kind
def test_a_parameter_that_was_replaced_is_freed_with_its_state(make: Callable[[Any], Any]) -> None:
    params = [Parameter(torch.ones(3, dtype=BF16)) for _ in range(2)]
    optimizer = make(params)
    steps(optimizer, params, 2)
    old = weakref.ref(params[0])
    params[0] = optimizer.param_groups[0]["params"][0] = Parameter(torch.ones(4, dtype=BF16))
    steps(optimizer, params)
    gc.collect()
    assert old() is None
    assert {*optimizer._own_masters.kept} == {*params}
    assert {*optimizer.state} <= {*params}
    assert len(optimizer.state_dict()["state"]) == 2


@each_kind
def test_a_parameter_that_leaves_its_group_for_a_while_comes_back_with_its_state(
    make: Callable[[Any], Any],
) -> None:
    params = [Parameter(torch.ones(3, dtype=BF16)) for _ in range(2)]
    twins = copy.deepcopy(params)
    optimizer, twin = make(params), make(twins)
    steps(optimizer, params, 3)
    steps(twin, twins, 3)
    listed = optimizer.param_groups[0]["params"]
    listed.remove(params[0])
    steps(optimizer, params[1:], 2)
    listed.insert(0, params[0])
    assert_same_bits(optimizer.master(params[0]), twin.master(twins[0]))
    steps(optimizer, params)
    steps(twin, twins)
    assert_same_bits(optimizer.master(params[0]), twin.master(twins[0]))


def resized(optimizer: Any, param: Parameter) -> Parameter:
    """As Gaussian splatting adds points: parameter and moments get rows, under a new object."""
    new = Parameter(torch.cat([param.detach(), torch.ones_like(param[:1])]))
    state = optimizer.state.pop(param, {})
    for name, value in state.items():
        if torch.is_tensor(value) and value.shape == param.shape:
            state[name] = torch.cat([value, torch.zeros_like(value[:1])])
    optimizer.state[new] = state
    optimizer.param_groups[0]["params"][0] = new
    return new


def resized_in_place(optimizer: Any, param: Parameter) -> Parameter:
    for state in optimizer.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == param.shape:
                state[name] = torch.cat([value, torch.zeros_like(value[:1])])
    param.data = torch.cat([param.detach(), torch.ones_like(param[:1])])
    return param


def moments_are_zeroed(optimizer: Any, param: Parameter) -> Parameter:
    for value in optimizer.state[param].values():
        if torch.is_tensor(value):
            value.zero_()
    return param


def moments_are_halved(optimizer: Any, param: Parameter) -> Parameter:
    for value in optimizer.state[param].values():
        if torch.is_tensor(value) and value.dim():
            value.mul_(0.5)
    return param


def state_is_cleared(optimizer: Any, param: Parameter) -> Parameter:
    optimizer.state.clear()
    return param


@each_kind
@pytest.mark.parametrize(
    "edit", [resized, resized_in_place, moments_are_zeroed, moments_are_halved, state_is_cleared]
)
def test_scripts_that_edit_the_state_do_not_meet_masters(
    edit: Callable[[Any, Parameter], Parameter], make: Callable[[Any], Any]
) -> None:
    param = Parameter(torch.ones(3, 2, dtype=BF16))
    optimizer = make([param])
    steps(optimizer, [param], 3)
    before = optimizer.master(param)
    new = edit(optimizer, param)
    if new is param and new.shape == before.shape:
        assert_same_bits(optimizer.master(param), before)
    else:  # The weights that a script has made are the masters.
        before = new.detach().float()
    steps(optimizer, [new])
    moved = optimizer.master(new) - before
    assert (moved > -(2.0**-2)).all()
    assert (moved < 0).all()


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("make", [KINDS["FusedSGD"], lambda p: MasterWeights(p, torch.optim.SGD)])
@pytest.mark.parametrize("frozen_first", [False, True])
def test_what_has_a_gradient_is_stepped_with_its_master_even_if_it_is_frozen(
    make: Callable[[Any], Any], dtype: torch.dtype, frozen_first: bool
) -> None:
    def moved(param: Parameter, make: Callable[[Any], Any]) -> Tensor:
        optimizer, scaler = make([param]), GradScaler("cpu", init_scale=2.0**10)
        for group in optimizer.param_groups:
            group["lr"] = 2.0**-3
        for step in range(3):
            param.requires_grad_(True)
            scaler.scale((param.float() * 2.0**-7).sum()).backward()
            param.requires_grad_(not (frozen_first or step))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return param.detach().float() if param.dtype == F32 else optimizer.master(param)

    expected = moved(Parameter(torch.ones(4)), lambda params: torch.optim.SGD(params, lr=1.0))
    assert_same_bits(moved(Parameter(torch.ones(4, dtype=dtype)), make), expected)


def test_a_frozen_layer_whose_gradients_are_set_to_zero_is_stepped() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(BF16)
    optimizer = MasterWeights(model.parameters(), torch.optim.NAdam, lr=1e-2)
    for step in range(4):
        model[0].requires_grad_(step < 2)
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(3, 4, dtype=BF16)).float().square().mean().backward()
        optimizer.step()
    assert len(optimizer._own_masters.kept) == 4


@each_kind
def test_masters_follow_parameters_to_another_device(
    make: Callable[[Any], Any], device: torch.device
) -> None:
    param = Parameter(torch.ones(3, 2, dtype=BF16, device=device))
    optimizer = make([param])
    steps(optimizer, [param], 3)
    before = optimizer.master(param)
    for place in (torch.device("cpu"), device):
        param.data, param.grad = param.data.to(place), None
        for state in optimizer.state.values():  # As scripts and trainers do.
            for name, value in state.items():
                state[name] = value.to(place) if torch.is_tensor(value) else value
        assert_same_bits(optimizer.master(param).cpu(), before.cpu())
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        steps(optimizer, [param])
        assert optimizer._own_masters.kept[param].device == param.device
    assert_same_bits(optimizer.master(param), before)

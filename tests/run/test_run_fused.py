"""torch's Adam, AdamW and SGD under `use_master_weights`: the fused step, with torch's numbers."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from master_weights_cases import BF16, F16, give_grads, in_float32, is_fused, new_params
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch import nn

import apex_mp
from apex_mp.masters.joined import differ
from apex_mp.optimizers import MasterWeights

# torch's test tools need it. `make test` has it; a machine with a GPU may not.
pytest.importorskip("expecttest")

# The import forbids the whole process to set flags of torch.backends, which other tests do.
with mock.patch("torch.backends.disable_global_flags"):
    from torch.testing._internal.common_optimizers import optim_db

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
# Options with which they step by MasterWeights.
LACKING = [
    (torch.optim.AdamW, "amsgrad"),
    (torch.optim.Adam, "amsgrad"),
    (torch.optim.SGD, "maximize"),
]
CASES = [
    pytest.param(info.optim_cls, given.kwargs, id=f"{info.optim_cls.__name__}-{given.desc}")
    for info in optim_db
    if info.optim_cls in FUSED
    for given in info.optim_inputs_func(device="cpu")
    if not any(info.optim_cls is cls and given.kwargs.get(name) for cls, name in LACKING)
    and not {"amsgrad", "differentiable"} & given.kwargs.keys()
]


@pytest.mark.parametrize(("optimizer_class", "kwargs"), CASES)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
def test_steps_are_the_fused_ones_with_the_numbers_of_float32_weights(
    optimizer_class: Any, kwargs: Any, dtype: torch.dtype, device: torch.device
) -> None:
    params = new_params(optimizer_class, dtype, device)
    twins = in_float32(params)
    with apex_mp.use_master_weights():
        optimizer = optimizer_class(params, **copy.deepcopy(kwargs))
        twin = optimizer_class(twins, **copy.deepcopy(kwargs))
        assert isinstance(optimizer, optimizer_class)
        assert type(twin) is optimizer_class
        for step in range(5):
            give_grads(params, twins, step)
            optimizer.step()
            twin.step()
    assert is_fused(optimizer)
    for param, expected in zip(params, twins, strict=True):
        assert param.dtype == dtype
        tolerance = TRAJECTORY_TOLERANCES[torch.float32]
        assert_near(optimizer.master(param), expected.detach(), tolerance)
        assert not differ(optimizer.master(param), param).any()
        kept = {name for name, value in twin.state[expected].items() if value is not None}
        assert optimizer.state[param].keys() == kept
        for name in kept:
            value: Any = torch.as_tensor(twin.state[expected][name])
            assert_near(optimizer.state[param][name].cpu(), value.cpu(), tolerance)


@pytest.mark.parametrize(("optimizer_class", "option"), LACKING)
def test_with_an_option_that_the_fused_step_lacks_torchs_own_step_has_masters(
    optimizer_class: Any, option: str
) -> None:
    with apex_mp.use_master_weights():
        param = nn.Parameter(torch.ones(4, dtype=BF16))
        options: dict[str, Any] = {option: True}
        optimizer = optimizer_class([{"params": [param], **options}], lr=1e-3)
        optimizer.step()
    assert isinstance(optimizer, MasterWeights)
    assert not is_fused(optimizer)
    assert optimizer.param_groups[0].keys() == optimizer.defaults.keys() | {"params"}


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_state_of_float32_steps_goes_on_where_the_model_becomes_16_bit(
    name: str, device: torch.device
) -> None:
    def new(params: Any) -> Any:
        momentum = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
        return getattr(torch.optim, name)(params, lr=1e-2, weight_decay=0.5, **momentum)

    with apex_mp.use_master_weights():
        model = nn.Linear(8, 4).to(device)
        twin = copy.deepcopy(model)
        optimizer, alone = new(model.parameters()), new(twin.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        torch.optim.lr_scheduler.StepLR(alone, 1).step = scheduler.step
        for step in range(4):
            give_grads([*model.parameters()], [*twin.parameters()], step)
            optimizer.step()
            alone.step()
            scheduler.step()
            alone.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
            if step == 1:
                before = [param.detach().clone() for param in model.parameters()]
                model.bfloat16()
                for param, value in zip(model.parameters(), before, strict=True):
                    assert_same_bits(optimizer.master(param), value)
    tolerance = TRAJECTORY_TOLERANCES[torch.float32]
    for param, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert_near(optimizer.master(param), expected.detach(), tolerance)


def test_hooks_groups_copies_and_calls_of_the_class_are_the_optimizers_own() -> None:
    called = []
    first, later = (nn.Parameter(torch.ones(4, dtype=BF16)) for _ in range(2))
    with apex_mp.use_master_weights():
        optimizer = torch.optim.AdamW([first], lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: called.append(1))
        optimizer.add_param_group({"params": [later], "weight_decay": 0.5})
        for param in (first, later):
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert called == [1]
    assert type(optimizer) is not torch.optim.AdamW
    assert type(optimizer).__qualname__ == "AdamW"
    assert type(type(optimizer)([torch.ones(1)], lr=1e-3, foreach=True)) is torch.optim.AdamW
    for copied_by in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        again = copied_by(optimizer)
        assert type(again) is type(optimizer)
        for group, of_copy in zip(optimizer.param_groups, again.param_groups, strict=True):
            param, copied = group["params"][0], of_copy["params"][0]
            assert_same_bits(again.master(copied), optimizer.master(param))
            param.grad = copied.grad = torch.ones_like(param)
        optimizer.step()
        again.step()
        for group, of_copy in zip(optimizer.param_groups, again.param_groups, strict=True):
            assert_same_bits(of_copy["params"][0].detach(), group["params"][0].detach())

"""MasterWeights: any optimizer steps 16-bit parameters as it steps float32 ones, to the bit."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from master_weights_cases import BF16, F16, both_kinds, check, give_grads, in_float32, new_params
from tolerances import assert_same_bits
from torch import Tensor

from apex_mp.optimizers import MasterWeights

# torch's test tools need it. `make test` has it; a machine with a GPU may not.
pytest.importorskip("expecttest")

# The import forbids the whole process to set flags of torch.backends, which other tests do.
with mock.patch("torch.backends.disable_global_flags"):
    from torch.testing._internal.common_optimizers import optim_db

low_dtypes = pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])


def cases(*, closures: bool) -> list[Any]:
    """The optimizers of torch's database, with each of its arguments."""
    return [
        pytest.param(info.optim_cls, given.kwargs, id=f"{info.optim_cls.__name__}-{given.desc}")
        for info in optim_db
        if info.optim_cls is not torch.optim.SparseAdam
        and closures == (info.optim_cls is torch.optim.LBFGS)
        for given in info.optim_inputs_func(device="cpu")
    ]


@pytest.mark.parametrize(("optimizer_class", "kwargs"), cases(closures=False))
@low_dtypes
@both_kinds
def test_steps_are_those_with_float32_weights(
    optimizer_class: Any, kwargs: Any, dtype: torch.dtype, kind: Any, device: torch.device
) -> None:
    params = new_params(optimizer_class, dtype, device)
    twins = in_float32(params)
    optimizer = MasterWeights(params, optimizer_class, master_weights=kind, **copy.deepcopy(kwargs))
    twin = optimizer_class(twins, **copy.deepcopy(kwargs))
    assert isinstance(optimizer, optimizer_class)
    for step in range(5):
        give_grads(params, twins, step)
        optimizer.step()
        twin.step()
        check(optimizer, params, twins)
    for param, expected in zip(params, twins, strict=True):
        assert param.grad.dtype == dtype
        state = twin.state[expected]
        assert {name: type(value) for name, value in optimizer.state[param].items()} == {
            name: type(value) for name, value in state.items()
        }
        for name, value in state.items():
            if torch.is_tensor(value):
                assert_same_bits(optimizer.state[param][name], value)


@pytest.mark.parametrize(("optimizer_class", "kwargs"), cases(closures=True))
@low_dtypes
def test_each_call_of_a_closure_computes_with_the_rounded_masters(
    optimizer_class: Any, kwargs: Any, dtype: torch.dtype, device: torch.device
) -> None:
    params = new_params(optimizer_class, dtype, device)
    twins = in_float32(params)
    optimizer = MasterWeights(params, optimizer_class, **kwargs)
    twin = optimizer_class(twins, **kwargs)
    seen: list[list[Tensor]] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((param.float() - 1.0).square().sum() for param in params)
        loss.backward()
        seen.append([loss.detach(), *(param.grad.clone() for param in params)])
        return loss

    def replayed() -> Tensor:
        loss, *grads = seen.pop(0)
        # The first call of a step computes with the weights of before.
        for param, grad in zip(twins, grads, strict=True):
            param.grad = grad.float()
        return loss

    for _ in range(3):
        result = optimizer.step(closure)
        assert_same_bits(torch.as_tensor(result), torch.as_tensor(twin.step(replayed)))
        assert not seen
        check(optimizer, params, twins)

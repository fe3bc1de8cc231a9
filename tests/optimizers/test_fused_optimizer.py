"""What the fused optimizers share: messages, the layout of the state, what a step returns."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from apex_mp import fp16_utils
from apex_mp.core.step import StepRequest, StepResult
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apex_mp.optimizers._state import Kept, StateLayout, unpack

pytestmark = pytest.mark.cpu_only

ADAGRAD = StateLayout("an Adagrad", tensors=("sum",))
NOVOGRAD = StateLayout("a NovoGrad", tensors=("exp_avg",), numbers=("step", "exp_avg_sq"))

each_fused = pytest.mark.parametrize(
    "fused", [FusedAdam, FusedSGD, FusedAdagrad, FusedNovoGrad, FusedLAMB]
)


def parameter(dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.ones(3, dtype=dtype))


@each_fused
def test_messages_have_the_published_name_in_a_subclass_too(fused: Any) -> None:
    class Mine(fused):  # type: ignore[misc]
        pass

    param = parameter()
    optimizer = Mine([param], lr=0.1)
    param.grad = torch.ones(3)
    name = rf"^{fused.__name__}\b"
    with pytest.raises(ValueError, match=name + ": lr is -1"):
        Mine([param], lr=-1)
    with pytest.raises(TypeError, match=name + ": unscale_grads is 3"):
        Mine([param], lr=0.1, unscale_grads=3)
    with pytest.raises(TypeError, match=name):
        optimizer.add_param_group({"params": [Parameter(torch.ones(3, dtype=torch.complex64))]})
    with pytest.raises(ValueError, match=name + ".step: scale is 0"):
        optimizer.step(scale=0.0)
    with pytest.raises(ValueError, match=name + ".step: grad_norms has 2 numbers"):
        optimizer.step(grad_norms=[1.0, 1.0])
    with pytest.raises(TypeError, match=name + r".load_state_dict: state_dict is a int"):
        optimizer.load_state_dict(3)
    saved = optimizer.state_dict()
    saved["state"] = {0: {"other": 1}}
    with pytest.raises(ValueError, match=name + r".load_state_dict: state\[0\] has \['other'\]"):
        optimizer.load_state_dict(saved)


@each_fused
def test_amsgrad_that_comes_later_is_refused_by_the_step(fused: Any) -> None:
    param = parameter()
    optimizer = fused([param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(RuntimeError, match=rf"^{fused.__name__} does not support the AMSGrad var"):
        optimizer.step()
    assert param.tolist() == [1.0, 1.0, 1.0]
    assert not optimizer.state


@each_fused
def test_a_step_returns_a_result_for_a_request_and_else_the_loss(fused: Any) -> None:
    param = parameter()
    optimizer = fused([param], lr=0.1)
    result = optimizer.step(lambda: 2.0, grads=StepRequest(check=True))
    assert isinstance(result, StepResult)
    assert result.without_grad == [(0, 0)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.sent = None  # type: ignore[misc]
    assert optimizer.step(lambda: 2.0) == 2.0
    assert optimizer.step() is None


def test_a_step_that_was_replaced_must_return_the_result() -> None:
    param = Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = fp16_utils.FP16_Optimizer(FusedAdam([param]), verbose=False)
    step = optimizer.optimizer.step

    @functools.wraps(step)
    def silent(*args: Any, **options: Any) -> None:
        step(*args, **options)

    optimizer.optimizer.step = silent
    optimizer.backward((param.float() * 2).sum())
    with pytest.raises(RuntimeError, match=r"FusedAdam.step returned None; a function that repl"):
        optimizer.step()


# --- The layout of the state


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_state_is_made_in_the_dtypes_of_its_names(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = NOVOGRAD.completed({}, parameter(dtype), {"master_weights": True})
    master = {"master_param": torch.float32} if dtype == torch.float16 else {}
    numbers = {"step": torch.float32, "exp_avg_sq": torch.float32}
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    assert dtypes == {**numbers, "exp_avg": wide, **master}
    assert [tensor.shape for tensor in state.values()] == [(), (), *[(3,)] * (1 + len(master))]
    assert ADAGRAD.completed({}, parameter(dtype), {}).keys() == {"sum"}


def test_what_a_state_has_stays_and_plain_numbers_become_tensors() -> None:
    average, square = torch.ones(3), torch.tensor(0.5)
    had = {"exp_avg": average, "exp_avg_sq": square, "step": 7, "mine": "kept"}
    state = NOVOGRAD.completed(had, parameter(), {})
    assert state["exp_avg"] is average
    assert state["exp_avg_sq"] is square
    assert state["step"].item() == 7.0
    assert state["mine"] == "kept"
    assert had["step"] == 7


def test_loaded_state_is_a_copy_that_keeps_its_dtype() -> None:
    param = parameter(torch.float16)
    average = torch.full((3,), 1e-9)
    saved = {"step": 2, "exp_avg": average, "exp_avg_sq": torch.tensor(4.0, dtype=torch.float64)}
    loaded = NOVOGRAD.loaded("here", saved, param)
    assert all(isinstance(value, Kept) for value in loaded.values())
    state: dict[str, Tensor] = unpack({param: loaded})[param]
    average.zero_()
    assert state["exp_avg"].tolist() == torch.full((3,), 1e-9).tolist()
    assert {name: tensor.dtype for name, tensor in state.items()} == dict.fromkeys(
        saved, torch.float32
    )
    assert (state["step"].item(), state["exp_avg_sq"].item()) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("layout", "state", "sentence"),
    [
        (ADAGRAD, {"step": 1}, r"here has \['step'\] and lacks \['sum'\]; .* state of an Adagrad"),
        (ADAGRAD, {"sum": torch.ones(2)}, r"here\['sum'\] has shape \[2\], its parameter \[3\]"),
        (ADAGRAD, {"sum": 1.0}, r"here\['sum'\] is of type float; it must be a floating tensor"),
        (
            NOVOGRAD,
            {"step": 1, "exp_avg": torch.ones(3), "exp_avg_sq": -1.0},
            r"here\['exp_avg_sq'\] is -1.0; it must be a finite number, 0 or more",
        ),
        (
            NOVOGRAD,
            {"step": torch.ones(3), "exp_avg": torch.ones(3), "exp_avg_sq": 1.0},
            r"here\['step'\] is tensor\(.*; it must be a number of steps",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_by_name(
    layout: StateLayout, state: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        layout.loaded("here", state, parameter())

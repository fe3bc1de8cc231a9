"""What the fused optimizers share: messages, the layout of the state, what a step returns."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from apex_mp import fp16_utils
from apex_mp.masters.layout import StateLayout
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

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


def test_a_function_in_the_place_of_a_step_must_call_it() -> None:
    param = Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = fp16_utils.FP16_Optimizer(FusedAdam([param]), verbose=False)
    step, calls = optimizer.optimizer.step, []

    @functools.wraps(step)
    def counting(*args: Any, **options: Any) -> None:
        calls.append(step(*args, **options))

    optimizer.optimizer.step = counting
    optimizer.backward((param.float() * 2).sum())
    optimizer.step()
    assert calls == [None]
    assert not optimizer.overflow
    optimizer.optimizer.step = functools.wraps(step)(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"FusedAdam.step was replaced by a function "):
        optimizer.step()


# --- The layout of the state


def test_what_a_state_has_stays_and_plain_numbers_become_tensors() -> None:
    average, square = torch.ones(3), torch.tensor(0.5)
    had = {"exp_avg": average, "exp_avg_sq": square, "step": 7, "mine": "kept"}
    state = NOVOGRAD.completed(had, parameter(), {})
    assert state["exp_avg"] is average
    assert state["exp_avg_sq"] is square
    assert state["step"].item() == 7.0
    assert state["mine"] == "kept"
    assert had["step"] == 7


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

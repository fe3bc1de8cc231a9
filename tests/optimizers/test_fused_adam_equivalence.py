"""FusedAdam equals torch.optim.Adam and AdamW, and where they have no such option, the formula."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import reference
import torch
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    F64,
    NAMES,
    assert_same_trajectory,
    copies_of,
    give_grads,
    make_params,
    train,
)
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdam

STEPS = range(300)

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "large lr": {"lr": 0.1},
    "weight decay": {"lr": 1e-2, "weight_decay": 0.1},
    "fast betas": {"lr": 1e-2, "betas": (0.5, 0.9)},
    "no momentum": {"lr": 1e-2, "betas": (0.0, 0.99)},
    "no memory at all": {"lr": 1e-3, "betas": (0.0, 0.0)},
    "large eps": {"lr": 1e-2, "eps": 1e-2},
    "maximize": {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
}
each_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
each_mode = pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "Adam"])
each_wide = pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)


def torch_adam(params: Any, adam_w_mode: bool, **options: Any) -> torch.optim.Adam:
    # AdamW has another default decay than FusedAdam, and than Adam.
    options = {"weight_decay": 0.0, **options}
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(
        params, foreach=False, **options
    )


@each_mode
@each_wide
@each_options
def test_300_steps_equal_those_of_torch_in_float64(
    options: dict[str, Any], dtype: torch.dtype, adam_w_mode: bool, device: torch.device
) -> None:
    params = make_params(device, dtype)
    expected_params = copies_of(params, F64)
    optimizer = FusedAdam(params, adam_w_mode=adam_w_mode, **options)
    expected = torch_adam(expected_params, adam_w_mode, **options)
    train(optimizer, params, STEPS)
    train(expected, expected_params, STEPS)
    assert_same_trajectory(
        optimizer, params, expected, expected_params, TRAJECTORY_TOLERANCES[dtype]
    )


@pytest.mark.parametrize("eps_inside_sqrt", [False, True])
@pytest.mark.parametrize("bias_correction", [False, True])
@each_mode
@each_wide
def test_300_steps_follow_the_formula_with_the_options_that_torch_lacks(
    dtype: torch.dtype,
    adam_w_mode: bool,
    bias_correction: bool,
    eps_inside_sqrt: bool,
    device: torch.device,
) -> None:
    # eps is large, so that it matters where it stands.
    options = {
        "lr": 1e-2,
        "eps": 1e-3,
        "weight_decay": 0.05,
        "adam_w_mode": adam_w_mode,
        "bias_correction": bias_correction,
        "eps_inside_sqrt": eps_inside_sqrt,
    }
    params = make_params(device, dtype, [(7, 3), (2,)])
    expected = [reference.Adam(p, torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    optimizer = FusedAdam(params, betas=(0.9, 0.99), **options)
    for step in STEPS:
        give_grads(params, step)
        for one, param in zip(expected, params, strict=True):
            one.update(param.grad, inv_scale=1.0, beta1=0.9, beta2=0.99, **options)
        optimizer.step()
    for one, param in zip(expected, params, strict=True):
        assert_near(param.detach(), one.param, TRAJECTORY_TOLERANCES[dtype])
        assert_near(optimizer.state[param]["exp_avg"], one.exp_avg, TRAJECTORY_TOLERANCES[dtype])
        assert_near(
            optimizer.state[param]["exp_avg_sq"], one.exp_avg_sq, TRAJECTORY_TOLERANCES[dtype]
        )


# --- The learning rate


LRS = {
    "0-dim": lambda lr: torch.tensor(lr),
    "1-element": lambda lr: torch.tensor([lr]),
    "float64": lambda lr: torch.tensor(lr, dtype=F64),
    "bfloat16": lambda lr: torch.tensor(lr, dtype=BF16),
}


@pytest.mark.parametrize("on_device", [False, True], ids=["on the CPU", "beside the parameters"])
@pytest.mark.parametrize("make_lr", LRS.values(), ids=LRS)
def test_a_tensor_lr_is_read_at_every_step(
    make_lr: Any, on_device: bool, device: torch.device
) -> None:
    lr = make_lr(2.0**-7).to(device if on_device else "cpu")
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer, expected = FusedAdam(params, lr=lr), FusedAdam(expected_params, lr=2.0**-7)
    for step in range(6):
        train(optimizer, params, [step])
        train(expected, expected_params, [step])
        lr.mul_(0.5)  # in place, as schedulers do
        expected.param_groups[0]["lr"] *= 0.5
    for param, wanted in zip(params, expected_params, strict=True):
        assert_same_bits(param.detach(), wanted.detach())


# --- Layouts


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "channels_last": channels_last,
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "gaps": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
}
EACH_GRAD_LAYOUT = [*itertools.product(("contiguous", "channels_last", "transposed"), LAYOUTS)]


@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "fp16 with masters"])
@pytest.mark.parametrize(("param_layout", "grad_layout"), EACH_GRAD_LAYOUT)
def test_the_layouts_of_parameter_and_gradient_do_not_matter(
    param_layout: str, grad_layout: str, masters: bool, device: torch.device
) -> None:
    dtype = F16 if masters else F32
    plain = make_params(device, dtype, [(2, 3, 4, 5)])
    laid = [Parameter(LAYOUTS[param_layout](plain[0].detach()))]
    strides = laid[0].stride()
    one = FusedAdam(laid, master_weights=masters)
    other = FusedAdam(plain, master_weights=masters)
    for step in range(3):
        give_grads(plain, step)
        # In place, because `.grad =` of another layout is what autograd itself may do.
        laid[0].grad = LAYOUTS[grad_layout](plain[0].grad)
        one.step()
        other.step()
    assert laid[0].stride() == strides
    assert_same_bits(laid[0].detach(), plain[0].detach())
    assert_same_bits(one.state[laid[0]]["exp_avg"], other.state[plain[0]]["exp_avg"])

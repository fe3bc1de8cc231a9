"""GradScaler.clip_grad_norm_: torch's numbers, without a pass of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_adam_cases import F16, make_params
from grad_scaler_cases import OF_TORCH, give_scaled, new_scaler
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from apex_mp.optimizers import FusedAdam


def test_sparse_gradients_are_unscaled_first_and_clipped_by_torch(device: torch.device) -> None:
    weight, bias = (
        Parameter(torch.ones(4, 2, device=device)),
        Parameter(torch.ones(2, device=device)),
    )
    values = torch.full((1, 2), 2048.0, device=device)
    weight.grad = torch.sparse_coo_tensor([[1]], values, (4, 2), device=device)
    bias.grad = torch.full((2,), 1024.0, device=device)
    optimizer = torch.optim.SGD([bias], lr=1.0)
    optimizer.add_param_group({"params": [weight]})
    scaler = new_scaler(device)
    with pytest.raises(NotImplementedError, match="SparseC"):  # torch's own
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert bias.grad.tolist() == [1.0, 1.0]


def test_unscale_loses_what_float16_cannot_hold_and_clipping_does_not(
    device: torch.device,
) -> None:
    # True gradients of 2**-10 to 2**-40; scaled by 2**16 all are numbers of float16.
    true = torch.pow(2.0, torch.arange(-10, -41, -1).double()).to(device)  # A GPU's are not exact.
    kept = {}
    for way in ("unscale_", "clip_grad_norm_", "step alone"):
        param = Parameter(torch.zeros(len(true), dtype=F16, device=device))
        optimizer = FusedAdam([param], betas=(0.0, 0.999), master_weights=True)
        scaler = new_scaler(device, init_scale=2.0**16)
        param.grad = (true * 2.0**16).half()
        assert torch.equal(param.grad.double(), true * 2.0**16)
        if way == "unscale_":
            scaler.unscale_(optimizer)
        elif way == "clip_grad_norm_":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        used = optimizer.state[param]["exp_avg"].double()  # beta1 is 0: the gradient
        kept[way] = int((used == true).sum())
        assert int((used != 0).sum()) == kept[way]
    # 2**-24 is the least number of float16: 2**-10 to 2**-24 are 15 of the 31.
    assert kept == {"unscale_": 15, "clip_grad_norm_": 31, "step alone": 31}


@pytest.mark.parametrize(
    ("make", "way", "checked", "unscaled"),
    [
        (FusedAdam, "step", 0, 0),
        (FusedAdam, "clip_grad_norm_", 0, 0),
        (FusedAdam, "unscale_", 0, 1),
        (FusedAdam, "both", 0, 1),
        (OF_TORCH["AdamW fused"], "step", 1, 0),
        (OF_TORCH["AdamW fused"], "clip_grad_norm_", 1, 0),
    ],
)
@pytest.mark.every_case
def test_a_fused_step_looks_at_gradients_once(
    make: Any, way: str, checked: int, unscaled: int, device: torch.device
) -> None:
    counts = {"check_": 0, "unscale_": 0}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            if func.namespace == "apex_mp":
                counts[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    params = make_params(device)
    optimizer = make(params)
    scaler = new_scaler(device)
    give_scaled(scaler, params, 0)
    with Counting():
        if way in ("clip_grad_norm_", "both"):
            scaler.clip_grad_norm_(optimizer, 1.0)
        if way in ("unscale_", "both"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert counts == {"check_": checked, "unscale_": unscaled}

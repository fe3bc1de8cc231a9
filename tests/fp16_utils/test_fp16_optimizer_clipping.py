"""Clipping: by torch on param_groups, by clip_master_grads, by the inner max_grad_norm."""

import math
from typing import Any

import pytest
import torch
from fp16_cases import (
    BF16,
    F16,
    F32,
    INF,
    STEPS_TO_COUNT_PASSES,
    assert_grads,
    faces,
    grads_used,
    master_grads,
    ones,
    passes_over,
    probes,
    pull,
    wrap,
)
from tolerances import assert_near

from apex_mp.optimizers import FusedAdam

MIX = (F16, F32, BF16)


def masters_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def mixed(device: torch.device) -> list[Any]:
    return [ones(4, dtype=dtype, device=device) for dtype in MIX]


@faces
@probes
@pytest.mark.parametrize(("norm_type", "expected"), [(1, 52.0), (INF, 8.0), (2.0, 18.0)])
def test_clipping_by_other_norms(
    norm_type: float, expected: float, probe: Any, face: Any, device: torch.device
) -> None:
    params = mixed(device)
    optimizer = wrap(probe(params), face)
    optimizer.backward(pull(*zip(params, (8.0, 4.0, 1.0), strict=True)))
    assert float(optimizer.clip_master_grads(100.0, norm_type=norm_type)) == expected
    assert float(optimizer.clip_master_grads(100.0, norm_type)) == expected


# max_grad_norm of the inner optimizer.


def groups_of_two(device: torch.device) -> list[dict[str, Any]]:
    return [
        {"params": [ones(4, device=device), ones(5, dtype=F32, device=device)]},
        {"params": [ones(3, dtype=BF16, device=device)], "max_grad_norm": 0.5},
        {"params": [ones(6, device=device)], "max_grad_norm": 0.0},
    ]


GRADS = [8.0, 4.0, 2.0, 1.0]
SIZES = [4, 5, 3, 6]
NORMS = [math.sqrt(4 * 64 + 5 * 16), math.sqrt(3 * 4), math.sqrt(6)]


@faces
@pytest.mark.parametrize("clip", ["group", "global"])
@pytest.mark.parametrize("look", [True, False], ids=["looked at", "unlooked at"])
@pytest.mark.parametrize("hook", [True, False], ids=["with a hook", "without"])
def test_max_grad_norm_clips_each_group(
    hook: bool, look: bool, clip: str, face: Any, device: torch.device
) -> None:
    inner = FusedAdam(groups_of_two(device), betas=(0.0, 0.999), max_grad_norm=1.0)
    optimizer = wrap(inner, face, clip=clip)
    if hook:
        optimizer.register_step_pre_hook(lambda *_: None)
    params = [
        param
        for group in optimizer._masters.groups
        for param in (*group.model_params, *group.fp32_params)
    ]
    optimizer.backward(pull(*zip(params, GRADS, strict=True)))
    if look:
        assert_grads(master_grads(optimizer), *GRADS)
    optimizer.step()
    norms = [math.hypot(*NORMS)] * 3 if clip == "global" else NORMS
    # As apex: divided by (norm + 1e-6) / max_norm, if that is above 1.
    factors = [1.0 / (norms[0] + 1e-6)] * 2 + [0.5 / (norms[1] + 1e-6), 1.0]
    for used, size, grad, factor in zip(grads_used(optimizer), SIZES, GRADS, factors, strict=True):
        assert_near(used, torch.full((size,), grad * factor, dtype=torch.float64))


@pytest.mark.parametrize("clip", ["group", "global"])
def test_max_grad_norm_measures_edited_gradients(clip: str, device: torch.device) -> None:
    params = mixed(device)
    inner = FusedAdam(params, betas=(0.0, 0.999), max_grad_norm=9.0)
    optimizer = wrap(inner, clip=clip)
    optimizer.backward(pull(*zip(params, (16.0, 8.0, 2.0), strict=True)))
    for master in masters_of(optimizer):
        master.grad.mul_(0.5)  # The norm is 18 now.
    optimizer.step()
    for used, grad in zip(grads_used(optimizer), (8.0, 4.0, 1.0), strict=True):
        assert_near(used, torch.full((4,), grad * 9.0 / (18.0 + 1e-6), dtype=torch.float64))


@pytest.mark.cpu_only  # the names of passes
@pytest.mark.parametrize("clip", ["group", "global"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_clipping_costs_no_pass(clip: str, max_grad_norm: float, device: torch.device) -> None:
    params = [ones(1000, device=device) for _ in range(4)]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
    optimizer = wrap(FusedAdam(groups, max_grad_norm=max_grad_norm), clip=clip)
    for _ in range(STEPS_TO_COUNT_PASSES):
        optimizer.backward(pull(*((param, 1.0) for param in params)))
        with passes_over(1000) as names:
            optimizer.step()
    assert names == ["apex_mp::check_pass", "apex_mp::adam_pass"]

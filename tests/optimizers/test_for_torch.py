"""Leaving: torch's optimizer goes on from `state_dict(for_torch=True)`, with its own keys alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fused_adam_cases import F16, F32
from torch import nn

from apex_mp import convert
from apex_mp.optimizers import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD

LEFT: dict[str, Any] = {
    "FusedAdamW": (FusedAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "FusedAdam, L2": (
        *(FusedAdam, torch.optim.Adam),
        {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False},
    ),
    "FusedSGD": (FusedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def steps(optimizer: Any, model: nn.Module, numbers: range) -> None:
    for number in numbers:
        torch.manual_seed(number)
        for param in model.parameters():
            param.grad = torch.randn(param.shape).to(param)
        optimizer.step()


@pytest.mark.parametrize("case", LEFT)
def test_torchs_optimizer_goes_on_in_float32(case: str, device: torch.device) -> None:
    ours, theirs, options = LEFT[case]
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(device).half()
    optimizer = ours(model.parameters(), master_weights=True, **options)
    steps(optimizer, model, range(3))
    wide = nn.Linear(5, 3).to(device)
    wide.load_state_dict(convert.masters(model, optimizer))
    saved = optimizer.state_dict(for_torch=True)
    left = theirs(wide.parameters(), lr=9.0)
    known = {*left.param_groups[0], "params"}
    assert {name for group in saved["param_groups"] for name in group} <= known
    assert not any("master_param" in state for state in saved["state"].values())
    left.load_state_dict(saved)
    stayed = nn.Linear(5, 3).to(device)  # Here in float32 by our own optimizer.
    stayed.load_state_dict(convert.masters(model, optimizer))
    own = ours(stayed.parameters(), **options)
    own.load_state_dict(optimizer.state_dict())
    steps(left, wide, range(3, 6))
    steps(own, stayed, range(3, 6))
    for param, wanted in zip(wide.parameters(), stayed.parameters(), strict=True):
        assert param.dtype == F32
        torch.testing.assert_close(param, wanted, rtol=1e-5, atol=1e-6)


def test_what_torch_has_not_cannot_be_left(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"FusedLAMB\.state_dict: for_torch is True; it must be F"):
        FusedLAMB([nn.Parameter(torch.ones(2, device=device))]).state_dict(for_torch=True)


def test_options_that_a_file_changes_are_said_once(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    params = [nn.Parameter(torch.ones(2, device=device, dtype=F16))]
    old = FusedAdam(params, lr=0.1, betas=(0.8, 0.9))
    new = FusedAdam(params, lr=0.2, max_grad_norm=1.0)
    with caplog.at_level(logging.INFO, "apex_mp"):
        new.load_state_dict(old.state_dict())
        new.load_state_dict(old.state_dict())
    (record,) = caplog.records
    assert record.getMessage() == (
        "FusedAdam.load_state_dict: betas of group 0 is (0.8, 0.9) as in the file, and was "
        "(0.9, 0.999); max_grad_norm of group 0 is 0.0 as in the file, and was 1.0"
    )
    caplog.clear()
    torchs = torch.optim.AdamW(params, lr=0.1)
    kept = FusedAdam(params, max_grad_norm=1.0)
    kept.load_state_dict(torchs.state_dict())
    assert kept.param_groups[0]["max_grad_norm"] == 1.0

"""What a sampler gets after a step: the 16-bit weights, whose storage is written by the step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from fp16_cases import BF16, F16, F32, INF
from torch import Tensor, nn

from apex_mp import convert
from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam


def policy_on(device: torch.device, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)).to(device, dtype)


def backward(policy: nn.Module, scaler: GradScaler, factor: float = 1.0) -> None:
    policy.zero_grad()
    param = next(policy.parameters())
    inputs = torch.randn(8, 64, device=param.device, dtype=param.dtype)
    scaler.scale(policy(inputs).float().square().mean() * factor).backward()


@contextlib.contextmanager
def no_wait(device: torch.device) -> Any:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def rounded_masters(policy: nn.Module, optimizer: Any, dtype: torch.dtype) -> list[Tensor]:
    return [optimizer.master(param).to(dtype) for param in policy.parameters()]


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_copy_that_is_queued_after_the_step_has_its_weights(
    dtype: torch.dtype, device: torch.device
) -> None:
    policy = policy_on(device, dtype)
    optimizer = FusedAdam(policy.parameters(), lr=0.1, master_weights=True)
    scaler = GradScaler(device.type, init_scale=256.0)
    shared = policy.state_dict()  # As a sampler in the same process has them.
    sent: dict[str, Tensor] = {}
    for step in range(3):
        before = [each.clone() for each in shared.values()]
        backward(policy, scaler, INF if step == 2 else 1.0)
        with no_wait(device):
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            sent = {name: weight.clone() for name, weight in policy.state_dict().items()}
            scaler.update()
        torch.testing.assert_close([*sent.values()], [*shared.values()], rtol=0, atol=0)
        assert scaler.step_was_skipped(optimizer) == (step == 2)
        moved = [not torch.equal(*pair) for pair in zip(shared.values(), before, strict=True)]
        assert all(moved) if step < 2 else not any(moved)
        masters = rounded_masters(policy, optimizer, dtype)
        torch.testing.assert_close([*sent.values()], masters, rtol=0, atol=0)


def test_a_sampler_in_another_precision_gets_weights_that_are_rounded_once(
    device: torch.device,
) -> None:
    policy = policy_on(device, F16)
    optimizer = FusedAdam(policy.parameters(), lr=1e-3, master_weights=True)
    scaler = GradScaler(device.type, init_scale=256.0)
    for _ in range(20):
        backward(policy, scaler)
        scaler.step(optimizer)
        scaler.update()
    wide = convert.masters(policy, optimizer)
    assert {weight.dtype for weight in wide.values()} == {F32}
    masters = rounded_masters(policy, optimizer, F32)
    torch.testing.assert_close([*wide.values()], masters, rtol=0, atol=0)
    sampler = policy_on(device, BF16)
    sampler.load_state_dict(wide)
    once = [*sampler.state_dict().values()]
    torch.testing.assert_close(once, [each.to(BF16) for each in masters], rtol=0, atol=0)
    twice = [weight.to(BF16) for weight in policy.state_dict().values()]
    assert any(not torch.equal(*pair) for pair in zip(once, twice, strict=True))

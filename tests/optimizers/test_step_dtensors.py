"""A step reads what this process holds of DTensors. test_sharded.py trains with them."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import pytest
import torch
from fp16_cases import F16, F32
from scaled_steps import take_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("one_process")]


def spread(tensor: Tensor, placement: Any = None) -> DTensor:
    mesh = init_device_mesh("cpu", (1,))
    return DTensor.from_local(tensor, mesh, [placement or Shard(0)])


def pair(dtype: torch.dtype, **options: Any) -> tuple[Any, Any, FusedAdam, FusedAdam]:
    """A plain parameter and a DTensor with its numbers, and an optimizer of each."""
    plain = nn.Parameter(torch.randn(5, 3).to(dtype))
    other = nn.Parameter(spread(plain.detach().clone()))
    made = [FusedAdam([param], lr=0.1, **options) for param in (plain, other)]
    return plain, other, made[0], made[1]


KEPT = ({"master_weights": True}, {"master_weights": "split", "moment_dtype": torch.bfloat16})


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kept", KEPT, ids=["float32", "16 bits"])
def test_the_numbers_are_those_of_a_plain_step(
    dtype: torch.dtype, given: bool, kept: dict[str, Any]
) -> None:
    plain, other, expected, optimizer = pair(dtype, **kept)
    for step in range(3):
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        grad = torch.randn(5, 3).to(dtype)
        plain.grad, other.grad = grad.clone(), spread(grad.clone())
        expected.step()
        if given:  # What this process holds, instead of .grad.
            other.grad = None
            optimizer.step(grads=[grad])
        else:
            optimizer.step()
    assert torch.equal(other.to_local(), plain)
    for name, value in expected.state[plain].items():
        found = optimizer.state[other][name]
        assert isinstance(found, DTensor) == (name != "step")
        assert torch.equal(found.to_local() if name != "step" else found, value)
    assert (other in optimizer._own_masters.kept) == (dtype == F16)
    master = optimizer.master(other)
    assert isinstance(master, DTensor)
    assert torch.equal(master.to_local(), expected.master(plain))


def test_a_gradient_must_be_divided_as_its_parameter_is() -> None:
    _, other, _, optimizer = pair(F32)
    before = other.to_local().clone()
    other.grad = spread(torch.ones(5, 3), Replicate())
    sentence = "grads[0][0] is a DTensor with the placements (Replicate(),), its parameter has"
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(other.to_local(), before)


def test_a_gradient_that_is_a_sum_in_parts_is_added_up() -> None:
    plain, other, expected, optimizer = pair(F32)
    plain.grad = torch.randn(5, 3)
    other.grad = spread(plain.grad.clone(), Partial())
    expected.step()
    optimizer.step()
    assert torch.equal(other.to_local(), plain)
    assert other.grad.placements == other.placements


def test_a_step_clips_and_looks_for_inf() -> None:
    plain, other, expected, optimizer = pair(F32, max_grad_norm=0.1)
    for number, bad in ((1, False), (1, True), (2, False), (3, False)):
        grad = torch.randn(5, 3)
        grad[0, 0] = torch.inf if bad else 1.0
        plain.grad, other.grad = grad.clone(), spread(grad.clone())
        results = [
            take_step(each, check=True, grads_of=[[param]])
            for each, param in ((expected, plain), (optimizer, other))
        ]
        assert [result.outcome.found_inf for result in results] == [bad, bad]
        assert optimizer.state[other]["step"] == number
        assert torch.equal(other.to_local(), plain)
    optimizer.param_groups[0]["max_grad_norm"] = expected.param_groups[0]["max_grad_norm"] = 0.0
    for each in (optimizer, expected):
        each.step()
    assert torch.equal(other.to_local(), plain)


def test_writes_after_clip_grad_norm_are_seen_in_either_tensor() -> None:
    writes: dict[str, Any] = {
        "nothing": lambda grad: None,
        "DTensor": lambda grad: grad.mul_(2.0),
        "part": lambda grad: grad.to_local().mul_(2.0),  # as FSDP2 adds up
    }
    for name, write in writes.items():
        _, other, _, optimizer = pair(F16, master_weights=True)
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        other.grad = spread(torch.ones(5, 3, dtype=F16))
        assert scaler.clip_grad_norm_(optimizer, 1e-3) == pytest.approx(math.sqrt(15) / 8)
        with torch.no_grad():
            write(other.grad)
        refused = pytest.raises(RuntimeError, match="written or replaced after")
        with contextlib.nullcontext() if name == "nothing" else refused:
            scaler.step(optimizer)

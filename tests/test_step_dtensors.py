"""A step reads what this process holds of DTensors. tests/test_sharded.py trains with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp16_cases import F16, F32
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from apex_mp.core.step import StepRequest
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


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("given", [False, True])
def test_the_numbers_are_those_of_a_plain_step(dtype: torch.dtype, given: bool) -> None:
    plain, other, expected, optimizer = pair(dtype, master_weights=True)
    for _ in range(3):
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
    assert ("master_param" in optimizer.state[other]) == (dtype == F16)


def test_a_gradient_must_be_divided_as_its_parameter_is() -> None:
    _, other, _, optimizer = pair(F32)
    before = other.to_local().clone()
    for placement, written in ((Partial(), "Partial(sum)"), (Replicate(), "Replicate()")):
        other.grad = spread(torch.ones(5, 3), placement)
        sentence = f"grads[0][0] is a DTensor with the placements ({written},), its parameter has"
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        assert sentence in str(raised.value)
    assert not optimizer.state
    assert torch.equal(other.to_local(), before)


def test_what_needs_numbers_of_all_processes_is_refused() -> None:
    _, other, _, optimizer = pair(F32)
    other.grad = spread(torch.ones(5, 3))
    with pytest.raises(RuntimeError, match=r"DTensors are stepped under apex_mp.amp.GradScaler"):
        optimizer.step(grads=StepRequest(check=True))
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with pytest.raises(RuntimeError, match="max_grad_norm does not clip DTensors; call scaler"):
        optimizer.step()
    assert not optimizer.state
    optimizer.param_groups[0]["max_grad_norm"] = 0.0
    optimizer.step()
    assert optimizer.state[other]["step"] == 1


def test_a_part_that_lies_otherwise_than_its_state_is_refused() -> None:
    _, other, _, optimizer = pair(F32)
    other.grad = spread(torch.ones(5, 3))
    optimizer.step()
    before = other.to_local().clone()
    other._local_tensor = other._local_tensor.t().contiguous().t()
    sentence = r"params\[0\]\[0\] is a DTensor whose part here lies in memory in another order"
    with pytest.raises(RuntimeError, match=sentence):
        optimizer.step()
    assert torch.equal(other.to_local(), before)


def test_a_state_of_plain_tensors_is_refused() -> None:
    plain, other, expected, optimizer = pair(F32)
    plain.grad = torch.ones(5, 3)
    expected.step()
    sentence = r"state\[0\]\['exp_avg'\] is a plain tensor, its parameter a DTensor; load it by"
    with pytest.raises(TypeError, match=sentence):
        optimizer.load_state_dict(expected.state_dict())
    other.grad = spread(torch.ones(5, 3))
    optimizer.step()
    again = FusedAdam([nn.Parameter(other.detach().clone())], lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    (loaded,) = again.state.values()
    assert torch.equal(loaded["exp_avg"].to_local(), expected.state[plain]["exp_avg"])

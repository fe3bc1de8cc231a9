"""Programs that people write, and that once went wrong under amp without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from apex_mp import amp
from apex_mp.parallel import DistributedDataParallel

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_grad_inside_the_block_clears_what_was_there(level: str, set_to_none: bool) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    norms = []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            optimizer.zero_grad(set_to_none=set_to_none)
            scaled_loss.backward()
        grads = [param.grad for param in amp.master_params(optimizer)]
        norms.append(torch.nn.utils.get_total_norm(grads).item())
        optimizer.step()
    assert norms[0] > 0
    assert norms == [norms[0]] * 3
    assert "scale_loss" not in str(vars(optimizer).get("zero_grad"))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("bucket_view", [False, True])
def test_gradients_that_ddp_has_not_reduced_yet_stay_scaled_and_add_up(bucket_view: bool) -> None:
    handle: Any = amp.init(loss_scale=128.0, device_type="cpu")
    model = nn.Linear(2, 1, bias=False)
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def block() -> None:
        loss = parallel(torch.ones(1, 2)).float().sum()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    with parallel.no_sync():
        block()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[128.0, 128.0]]
    block()
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
    block()  # Another one, in sync, before the step.
    assert model.weight.grad.tolist() == [[3.0, 3.0]]
    optimizer.step()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("first", ["disable_allreduce", "enable_allreduce"])
def test_switching_reduction_inside_a_block_is_refused(first: str) -> None:
    handle: Any = amp.init(loss_scale=128.0, device_type="cpu")
    model = nn.Linear(2, 1, bias=False)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if first == "enable_allreduce":
        parallel.disable_allreduce()

    def block(switch: Any) -> None:
        loss = parallel(torch.ones(1, 2)).float().sum()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            switch()
            scaled_loss.backward()

    with pytest.raises(RuntimeError, match="stay in this process was changed inside the block"):
        block(getattr(parallel, first))
    optimizer.zero_grad()
    parallel.enable_allreduce()
    block(lambda: None)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]

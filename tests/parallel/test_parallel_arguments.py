"""What DistributedDataParallel refuses, and what it says of arguments that have no effect."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from apex_mp.parallel import DistributedDataParallel, SyncBatchNorm

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"shared_param": True}, "shared_param is given; it is no longer supported as an option"),
        (
            {"delay_allreduce": True, "allreduce_trigger_params": []},
            "allreduce_trigger_params is given with delay_allreduce=True; it is only valid with",
        ),
        # Positional arguments of early 2019: gradient_average is the last.
        (
            {"num_allreduce_streams": False},
            "num_allreduce_streams is False; it must be a number. In the spring of 2019 gradient_a",
        ),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor is 0.0; it must be above"),
        (
            {"gradient_average_split_factor": -2.0},
            "gradient_predivide_factor is -2.0; it must be above 0",
        ),
        (
            {"gradient_predivide_factor": 2.0, "gradient_average_split_factor": 4.0},
            "split_factor is 4.0 and gradient_predivide_factor 2.0; they are one thing",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):  # There is no process group yet.
        DistributedDataParallel(nn.Linear(1, 1), **arguments)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allreduce_trigger_params", []),
        ("num_allreduce_streams", 2),
        ("allreduce_communicators", ([None], [None])),
        ("prof", True),
    ],
)
def test_an_argument_without_effect_is_named(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Linear(2, 1, bias=False)
    model = DistributedDataParallel(module, **{name: value})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"DistributedDataParallel: {name} has no effect: ")
    model(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None


@pytest.mark.usefixtures("one_process")
def test_a_deepcopied_model_has_switches_of_its_own() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    model.disable_allreduce()
    other = copy.deepcopy(model)
    other.enable_allreduce()
    assert not model.allreduce_is_enabled
    assert other.allreduce_is_enabled


def test_sync_batch_norm_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    x = torch.randn(4, 3, 2)
    norm, reference = SyncBatchNorm(3), nn.BatchNorm1d(3)
    torch.testing.assert_close(norm(x), reference(x))
    torch.testing.assert_close(norm.eval()(x), reference.eval()(x))


@pytest.mark.parametrize("fuse_relu", [False, True])
def test_sync_batch_norm_evaluates_channels_last(fuse_relu: bool) -> None:
    x = torch.randn(4, 5, 3)
    norm, reference = SyncBatchNorm(3, channel_last=True, fuse_relu=fuse_relu), nn.BatchNorm1d(3)
    for _ in range(2):
        wanted = reference(x.movedim(-1, 1)).movedim(1, -1)
        torch.testing.assert_close(norm(x), wanted.relu() if fuse_relu else wanted)
        norm, reference = norm.eval(), reference.eval()

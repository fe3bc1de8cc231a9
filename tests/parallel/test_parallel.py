"""parallel: old names and arguments over what torch has today."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from apex_mp import amp
from apex_mp.core import flat_calls
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.masters import parallel_masters
from apex_mp.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

pytestmark = pytest.mark.cpu_only


@pytest.mark.usefixtures("one_process", "amp_off")
@pytest.mark.parametrize(
    "set_up",
    [
        lambda model, optimizer: amp.init(device_type="cpu"),
        lambda model, optimizer: amp.initialize(model, optimizer, opt_level="O0", verbosity=0),
        lambda model, optimizer: FP16_Optimizer(optimizer, verbose=False),
        lambda model, optimizer: DistributedDataParallel(model),
        lambda model, optimizer: amp.GradScaler("cpu"),
    ],
    ids=["amp.init", "amp.initialize", "FP16_Optimizer", "DistributedDataParallel", "GradScaler"],
)
def test_what_sets_up_mixed_precision_has_join_end_with_equal_masters(
    set_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs = nn.parallel.DistributedDataParallel
    monkeypatch.setattr(torchs, "join_hook", parallel_masters._torchs_join_hook)
    model = nn.Linear(3, 1)
    set_up(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hook = torchs(nn.Linear(3, 1)).join_hook()
    assert isinstance(hook, parallel_masters.FollowingJoinHook)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("arguments", "factor"),
    [
        ({}, 1.0),
        ({"delay_allreduce": True, "message_size": 1}, 1.0),
        ({"gradient_predivide_factor": 4.0}, 1.0),
        ({"gradient_predivide_factor": 4.0, "gradient_average": False}, 0.25),
        ({"allreduce_always_fp32": True}, 1.0),
    ],
)
def test_distributed_data_parallel_reduces_gradients(
    arguments: dict[str, Any], factor: float
) -> None:
    module = nn.Linear(3, 1)
    model = DistributedDataParallel(module, **arguments)
    model(torch.ones(2, 3)).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[2.0 * factor] * 3]
    assert set(model.state_dict()) == {"module.weight", "module.bias"}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("arguments", "used"), [({}, (0, 0, 0)), ({"delay_allreduce": True}, (0, 0, 1, 0))]
)
def test_distributed_data_parallel_takes_parameters_that_get_no_gradient(
    arguments: dict[str, Any], used: tuple[int, ...]
) -> None:
    module = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    module.forward = lambda x, which: module[which](x)  # type: ignore[method-assign]
    model = DistributedDataParallel(module, **arguments)
    for which in used:
        model(torch.ones(2, 3), which).sum().backward()
    for index, linear in enumerate(module):
        grad, count = linear.weight.grad, used.count(index)
        assert (grad is None) if count == 0 else (grad.tolist() == [[2.0 * count] * 3])


@pytest.mark.usefixtures("one_process")
def test_a_join_that_divides_by_other_numbers_is_refused_where_a_hook_reduces() -> None:
    model = DistributedDataParallel(nn.Linear(3, 1), gradient_average=False)
    with pytest.raises(ValueError, match="divide_by_initial_world_size=False, which torch"):
        model.join(divide_by_initial_world_size=False)
    model = DistributedDataParallel(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="Leave it True"), model.join(False):
        model.disable_allreduce()


def test_batch_norms_become_synchronised_and_keep_their_tensors() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2)), nn.InstanceNorm2d(2)
    )
    weight, mean = model[1][0].weight, model[1][0].running_mean
    reference = copy.deepcopy(model)
    converted: Any = convert_syncbn_model(model)
    assert isinstance(converted[1][0], SyncBatchNorm)
    assert isinstance(converted[2], nn.InstanceNorm2d)
    assert converted[1][0].weight is weight
    assert converted[1][0].running_mean is mean
    x = torch.randn(3, 1, 2, 2)
    assert torch.equal(converted(x), reference(x))
    assert converted.state_dict().keys() == reference.state_dict().keys()
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    assert [isinstance(each, nn.SyncBatchNorm) for each in converted.modules()] == [
        isinstance(each, nn.SyncBatchNorm) for each in theirs.modules()
    ]
    assert isinstance(convert_syncbn_model(nn.BatchNorm1d(2)), SyncBatchNorm)
    assert not convert_syncbn_model(nn.BatchNorm1d(2).eval()).training


@pytest.mark.usefixtures("one_process")
def test_sync_batch_norm_of_one_process_runs_on_the_cpu_channels_last_too() -> None:
    x = torch.randn(3, 4, 5, 2)
    norm = SyncBatchNorm(2, channel_last=True, fuse_relu=True)
    wanted = nn.BatchNorm2d(2)(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(norm(x, z=x), (wanted + x).relu())
    assert create_syncbn_process_group(0) is None
    assert create_syncbn_process_group(1) is not None
    with pytest.raises(ValueError, match="group_size is 2; it must divide"):
        create_syncbn_process_group(2)


@pytest.mark.usefixtures("one_process")
def test_flat_calls_reach_every_tensor_of_every_type() -> None:
    tensors = [torch.ones(2), torch.ones(1, 3).half(), torch.ones(()), torch.ones(1).double()]
    given: list[torch.Tensor] = []
    flat_calls.extract_tensors([tensors[:2], {"a": tensors[2]}, (tensors[3], "text", 3)], given)
    assert all(map(lambda a, b: a is b, given, tensors))
    buckets = flat_calls.split_half_float_double(given)
    assert [len(bucket) for bucket in buckets] == [1, 2, 1]
    sizes: list[int] = []

    def double(flat: torch.Tensor, factor: float) -> None:
        sizes.append(flat.numel())
        flat.mul_(factor)

    flat_calls.flat_dist_call(given, double, (2.0,))
    assert sizes == [3, 3, 1]
    flat_calls.flat_dist_call(given, dist.all_reduce)
    assert [tensor.flatten().tolist() for tensor in tensors] == [[2.0] * 2, [2.0] * 3, [2.0], [2.0]]


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

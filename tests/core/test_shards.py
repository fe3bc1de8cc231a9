"""Numbers of parts are added up over processes; here the other process finds what this one does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from apex_mp.amp import GradScaler
from apex_mp.amp._scale_loss.block import scaled_backward
from apex_mp.grads.found_inf import FoundInf
from apex_mp.grads.shards import agree
from apex_mp.optimizers import FusedAdam
from apex_mp.scale.amp_scaler import LossScaler

pytestmark = pytest.mark.cpu_only


CPU = torch.device("cpu")


# What the other process has, if it is not what this one has: loss scale, and parameters.
OTHER: dict[str, Any] = {}


@pytest.fixture
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Be the first of two processes that have the same numbers; the size of each all-reduce."""
    sizes: list[int] = []

    def all_reduce(numbers: Tensor, group: dist.ProcessGroup) -> None:
        sizes.append(numbers.numel())
        numbers.mul_(group.size())

    def all_gather_object(found: list[Any], mine: Any, group: dist.ProcessGroup) -> None:
        found[:] = [mine, mine]
        if {0} not in mine.values():  # Sums and norms of parameters.
            return
        ((scale, params),) = mine
        its = OTHER.get("scale", scale), (*OTHER.get("params", lambda own: own)(params),)
        found[1] = {its: {1}}

    OTHER.clear()
    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=getattr(request, "param", 2)
    )
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    yield sizes
    dist.destroy_process_group()


def spread(tensor: Tensor, placement: Shard | Replicate | None = None) -> DTensor:
    return DTensor.from_local(tensor, init_device_mesh("cpu", (2,)), [placement or Shard(0)])


def test_squares_of_what_is_divided_add_up_and_others_count_once(calls: list[int]) -> None:
    params = [torch.ones(2), spread(torch.ones(2)), spread(torch.ones(2), Replicate())]
    for rows in ([0, 1, 2], [1, 2], [0]):
        found, other = FoundInf(), FoundInf()
        grads = [torch.full((2,), 10.0**row) for row in rows]
        found.check(grads, rows, len(params))
        other.add({CPU: torch.ones(())})
        agree(params, [found, other], sums=True, scale=1.0)
        squares = [2 * 100.0**r * (2 if r == 1 else 1) * (r in rows) for r in range(3)]
        assert found.norms == pytest.approx([square**0.5 for square in squares])
        assert not found
        assert other
    assert calls == [2 + 3] * 3  # whichever have a gradient


# Without a scaler no step is skipped.
@pytest.mark.parametrize(
    ("way", "bad"), [("max_grad_norm", False), ("scaler", False), ("scaler", True)]
)
def test_a_step_clips_by_the_norm_of_the_whole_and_skips(
    way: str, bad: bool, calls: list[int]
) -> None:
    part = torch.randn(4, 2)
    grad = torch.randn(4, 2)
    grad[0, 0] = torch.inf if bad else 1.0
    divided = nn.Parameter(spread(part.clone()))
    whole = nn.Parameter(torch.cat([part, part]))
    divided.grad, whole.grad = spread(grad.clone()), torch.cat([grad, grad])
    for param in (divided, whole):
        clip = 0.1 if way == "max_grad_norm" else 0.0
        optimizer = FusedAdam([param], lr=0.1, eps=1.0, max_grad_norm=clip)
        if way == "max_grad_norm":
            optimizer.step()
            continue
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        norm = scaler.clip_grad_norm_(optimizer, 0.1)
        assert bad or norm == pytest.approx(grad.norm() * 2**0.5 / 4)
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer) == bad
    torch.testing.assert_close(divided.to_local(), whole[:4])  # type: ignore[attr-defined]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"scale": 8.0}, "the loss scale is 4.0 in rank 0 and 8.0 in rank 1. Processes that hold"),
        (
            {"params": lambda own: own[::-1]},
            r"parameter 0 is \[4\] in torch.float16 in rank 0 and \[6, 2\] in torch.float32",
        ),
        ({"params": lambda own: own[:1]}, "rank 0 has 2 parameters and rank 1 has 1"),
    ],
)
@pytest.mark.parametrize(
    "way", ["step", "clip_grad_norm_", "unscale_", "max_grad_norm", "scale_loss"]
)
def test_processes_that_do_not_fit_each_other_are_named_before_the_first_step(
    way: str, other: dict[str, Any], sentence: str, calls: list[int]
) -> None:
    if way == "max_grad_norm" and "scale" in other:
        pytest.skip("there is none")
    params = [nn.Parameter(spread(torch.ones(2).half())), nn.Parameter(spread(torch.ones(3, 2)))]
    clip = 0.1 if way == "max_grad_norm" else 0.0
    optimizer = FusedAdam(params, master_weights=True, max_grad_norm=clip)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))

    def step() -> None:
        loss = torch.ones(())
        with contextlib.ExitStack() as stack:
            if way == "scale_loss":
                stack.enter_context(scaled_backward(loss, [optimizer], LossScaler(4.0)))
            for param in params:
                param.grad = spread(torch.ones_like(param.to_local()))
        ways = {
            "step": lambda: scaler.step(optimizer),
            "unscale_": lambda: scaler.unscale_(optimizer),
            "clip_grad_norm_": lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        }
        ways.get(way, optimizer.step)()

    OTHER.update(other)
    with pytest.raises(RuntimeError, match=sentence):
        step()
    assert all(param.to_local().eq(1.0).all() for param in params)
    assert not optimizer.state


@pytest.mark.usefixtures("calls")
def test_a_part_that_overflows_when_it_is_unscaled_skips_its_optimizers_step() -> None:
    params = [nn.Parameter(spread(torch.ones(2).half())) for _ in range(2)]
    optimizers = [FusedAdam([param], lr=0.1) for param in params]
    with scaled_backward(torch.ones(()), optimizers, LossScaler(2.0**-10)):
        for param, value in zip(params, (100.0, 1.0), strict=True):
            param.grad = spread(torch.full((2,), value).half())
    for optimizer in optimizers:
        optimizer.step()
    assert [bool(param.to_local().eq(1.0).all()) for param in params] == [True, False]


def test_processes_are_compared_at_the_first_step_only(calls: list[int]) -> None:
    param = nn.Parameter(spread(torch.ones(2)))
    param.grad = spread(torch.ones(2))
    optimizer = FusedAdam([param], max_grad_norm=1.0)
    for _ in range(2):
        optimizer.step()
        OTHER["params"] = lambda own: []
    assert len(calls) == 2


def test_inf_of_another_process_is_known(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, group: numbers[:1].add_(1.0))
    param = nn.Parameter(spread(torch.ones(2)))
    optimizer, scaler = FusedAdam([param]), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    param.grad = spread(torch.ones(2))
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)

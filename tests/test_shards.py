"""Numbers of parts are added up over processes; here the other process finds what this one does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from apex_mp.amp import GradScaler
from apex_mp.core.found_inf import FoundInf
from apex_mp.core.shards import agree
from apex_mp.optimizers import FusedAdam

pytestmark = pytest.mark.cpu_only
CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Be the first of two processes that have the same numbers; the size of each all-reduce."""
    sizes: list[int] = []

    def all_reduce(numbers: Tensor, group: dist.ProcessGroup) -> None:
        sizes.append(numbers.numel())
        numbers.mul_(group.size())

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    yield sizes
    dist.destroy_process_group()


def spread(tensor: Tensor, placement: Shard | Replicate | None = None) -> DTensor:
    return DTensor.from_local(tensor, init_device_mesh("cpu", (2,)), [placement or Shard(0)])


def test_squares_of_what_is_divided_add_up_and_others_count_once(calls: list[int]) -> None:
    params = [torch.ones(2), spread(torch.ones(2)), spread(torch.ones(2), Replicate())]
    for rows in ([0, 1, 2], [1, 2], [0]):
        found, other = FoundInf(), FoundInf()
        grads = [torch.full((2,), 10.0**row) for row in rows]
        found.check(grads, range(len(rows)), len(rows))
        other.add({CPU: torch.ones(())})
        agree(params, [found, other], {CPU: rows})
        squares = [2 * 100.0**r * (2 if r == 1 else 1) * (r in rows) for r in range(3)]
        assert found.norms == pytest.approx([square**0.5 for square in squares])
        assert not found
        assert other
    assert calls == [2 + 3] * 3  # whichever have a gradient


def test_there_is_no_collective_without_parts(calls: list[int]) -> None:
    agree([torch.ones(2), spread(torch.ones(2), Replicate())], [FoundInf()], {})
    assert not calls


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


def test_inf_of_another_process_is_known(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, group: numbers[:1].add_(1.0))
    param = nn.Parameter(spread(torch.ones(2)))
    optimizer, scaler = FusedAdam([param]), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    param.grad = spread(torch.ones(2))
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)

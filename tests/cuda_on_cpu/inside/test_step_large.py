"""Rows of more than 2**31 numbers in the fused step, of which only the ends are run."""

from __future__ import annotations

import dataclasses
import mmap

import pytest
import torch
from on_cuda_kernels import choose
from op_cases import CHUNK, F16, F32
from step_cases import sample, step_exactly, written
from step_driver import Adam, Group, Row, Sgd, Step, Task

ENDS = 2  # blocks run at each end
RUN = ENDS * CHUNK
SIZE = 2**31 + RUN


def large(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers in gigabytes of memory that exist only where they are touched."""
    memory = mmap.mmap(-1, dtype.itemsize * SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=dtype)
    numbers = torch.rand(2 * RUN, generator=torch.Generator().manual_seed(seed))
    tensor[:RUN], tensor[-RUN:] = numbers[:RUN], numbers[RUN:]
    return tensor


@pytest.mark.parametrize("group", [Adam(), Sgd()], ids=["adam", "sgd"])
def test_a_row_of_more_than_2_to_the_31_numbers_is_stepped_to_its_end(group: Group) -> None:
    def task_of(tensors: list[torch.Tensor]) -> Task:
        param, grad, copy, *state = tensors
        return Task([Row(param, grad, copy, state, [torch.zeros(())])], [group], scale=8.0)

    dtypes = (F32, F16, F16, *[F32] * (2 if isinstance(group, Adam) else 1))
    tensors = [large(dtype, seed) for seed, dtype in enumerate(dtypes)]
    task = task_of(tensors)
    small = task_of([torch.cat([each[:RUN], each[-RUN:]]) for each in tensors])
    choose(blocks_at_ends=ENDS)
    outcome = Step(task).run(task)
    choose()
    step_exactly(small, outcome)
    results = (written(each.rows[0]).values() for each in (task, small))
    for ours, wanted in zip(*results, strict=True):
        ends = ours if ours.dim() == 0 else torch.cat([ours[:RUN], ours[-RUN:]])
        assert torch.equal(ends, wanted)


@pytest.mark.parametrize("place", [0, 2**31, SIZE - 1])
def test_pass_1_reads_the_ends_of_a_row_of_more_than_2_to_the_31_numbers(place: int) -> None:
    small = sample([5], [(F32,), (F16,), (None,)]).rows[0]
    grad = large(F16, 0)
    grad[place] = float("inf")
    huge = torch.empty(1).as_strided((SIZE,), (0,))
    task = Task([dataclasses.replace(small, param=huge, grad=grad)], [Adam()], check=True)
    step = Step(task)
    choose(blocks_at_ends=ENDS)
    step.run(task)  # No block is the last one: nothing is decided, and pass 2 stays away.
    arrived, found_inf = step.memory[:8].view(torch.int32).tolist()
    assert (arrived, found_inf) == (2 * ENDS, 1)

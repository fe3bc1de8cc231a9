"""Tensors of more than 2**31 numbers, of which only the ends are run; more chunks than threads."""

from __future__ import annotations

import mmap

import pytest
import torch
from exact_lists import CPU, OFFSETS, assert_computes_what_the_reference_says, sample
from on_cuda_kernels import choose
from op_cases import CHUNK, F16, F64, OPERATOR, number
from tolerances import assert_same_bits
from torch import Tensor

ENDS = 2  # blocks run at each end
RUN = ENDS * CHUNK  # numbers in them: the last blocks begin behind number 2**31
SIZE = 2**31 + RUN


@pytest.fixture
def large() -> Tensor:
    """Return float16 numbers in 4 GiB of memory that exists only where it is touched."""
    tensor = torch.frombuffer(mmap.mmap(-1, 2 * SIZE), dtype=F16)
    for end in (tensor[: 2 * RUN], tensor[-2 * RUN :]):
        end.copy_(torch.randn(2 * RUN))
    choose(blocks_at_ends=ENDS)
    return tensor


def ends_of(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[: 2 * RUN], tensor[-2 * RUN :]])


def was_run() -> Tensor:
    """Return which numbers of `ends_of` belong to blocks that were run."""
    places = torch.arange(4 * RUN)
    return (places < RUN) | (places >= 3 * RUN)


def test_unscale_finds_the_last_numbers_of_a_large_tensor(large: Tensor) -> None:
    before = ends_of(large)
    found_inf = torch.zeros(1)
    OPERATOR["unscale_"].overload([large], [large], number(0.5, CPU), found_inf)
    assert_same_bits(ends_of(large), torch.where(was_run(), before * 0.5, before))
    assert found_inf.item() == 0


def test_axpby_finds_the_last_numbers_of_a_large_tensor(large: Tensor) -> None:
    before = ends_of(large)
    factors = number(0.5, CPU), number(0.25, CPU)
    OPERATOR["axpby_"].overload([large], [large], [large], *factors, torch.zeros(1))
    assert_same_bits(ends_of(large), torch.where(was_run(), before * 0.75, before))


@pytest.mark.parametrize("place", [0, 2**31 - 1 + CHUNK, SIZE - 1])
def test_check_finds_inf_in_a_large_tensor(large: Tensor, place: int) -> None:
    found_inf = torch.zeros(1)
    arguments = [large], [0], found_inf, torch.zeros(1, dtype=F64)
    OPERATOR["check_"].overload(*arguments)
    assert found_inf.item() == 0
    large[place] = float("inf")
    OPERATOR["check_"].overload(*arguments)
    assert found_inf.item() == 1


def test_more_chunks_than_a_block_has_threads_are_summed() -> None:
    sizes = [5, 257 * CHUNK + 1, 256 * CHUNK, 0, 7]
    call = sample("check_", sizes, [(F16,)], OFFSETS["aligned"])
    assert_computes_what_the_reference_says("check_", call)

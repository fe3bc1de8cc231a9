"""Every size around a chunk's edge and every offset, several launches, orders, host numbers."""

from __future__ import annotations

import math

import pytest
import torch
from exact_lists import (
    CHUNKS,
    CPU,
    OFFSETS,
    SIZES,
    Offsets,
    around,
    assert_computes_what_the_reference_says,
    count_chunks,
    sample,
    with_chunks_of,
)
from on_cuda_kernels import ORDERS, all_blocks, choose
from op_cases import (
    A_FEW,
    CHUNK,
    DTYPES,
    F16,
    F32,
    F64,
    MIXED,
    OPERATOR,
    OPERATORS,
    SMALLEST_CHUNK,
    Arguments,
    Dtypes,
    copy_of,
    name_of,
    tensors_of,
)
from tolerances import assert_same_bits

LIST_OPERATORS = [operator.name for operator in OPERATORS if operator.lists]
ROWS = [(operator, dtypes) for operator in LIST_OPERATORS for dtypes in DTYPES[operator]]
each_row = pytest.mark.parametrize(
    ("operator", "dtypes"), ROWS, ids=[f"{operator}-{name_of(dtypes)}" for operator, dtypes in ROWS]
)
# One call each that takes the vector paths of its kernel.
HALF_TO_FLOAT = {
    "check_": [(F16,)],
    "exponents_": [(F16,)],
    "unscale_": [(F16,), (F32,)],
    "axpby_": [(F16,), (F16,), (F32,)],
}
each_operator = pytest.mark.parametrize("operator", HALF_TO_FLOAT)


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@each_row
def test_every_size_around_a_chunk_is_computed_and_nothing_else(
    operator: str, dtypes: list[Dtypes], offsets: Offsets
) -> None:
    call = sample(operator, SIZES, dtypes, offsets)
    assert_computes_what_the_reference_says(operator, call)


@pytest.mark.parametrize("dtypes", DTYPES["exponents_"], ids=name_of)
def test_a_chunk_of_the_largest_size_is_counted(dtypes: list[Dtypes]) -> None:
    call = sample("exponents_", with_chunks_of(CHUNK, [CHUNK]), dtypes, OFFSETS["aligned"])
    assert_computes_what_the_reference_says("exponents_", call)


@pytest.mark.parametrize("chunk", CHUNKS)
@each_operator
def test_every_size_around_a_chunk_of_another_size_is_computed(operator: str, chunk: int) -> None:
    sizes = around(chunk)
    call = sample(operator, sizes, HALF_TO_FLOAT[operator], OFFSETS["each list off by another"])
    choose()
    assert_computes_what_the_reference_says(operator, call)
    if operator != "check_":  # whose chunks are of one size in all lists
        of_other_kernels = all_blocks() - count_chunks(sizes, chunk)
        assert 0 <= of_other_kernels <= 3


def test_the_sum_of_a_tensor_does_not_depend_on_the_others() -> None:
    tensors = [torch.randn(size) for size in around(CHUNK)]
    alone = sum_of_first(tensors[:1])
    assert_same_bits(sum_of_first(tensors[:40]), alone)
    assert_same_bits(sum_of_first(tensors), alone)


def sum_of_first(tensors: list[torch.Tensor]) -> torch.Tensor:
    sums = torch.zeros(len(tensors), dtype=F64)
    torch.ops.apex_mp.check_(tensors, [*range(len(tensors))], torch.zeros(1), sums)
    return sums[:1]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 40, CHUNK + 1])
@each_operator
def test_every_pair_of_offsets_is_computed(operator: str, size: int) -> None:
    pairs = [(one, other) for one in range(17) for other in (range(17) if size < 9 else (one, 3))]
    call = sample(
        operator, [size] * len(pairs), HALF_TO_FLOAT[operator], lambda i, j: pairs[i][j % 2]
    )
    assert_computes_what_the_reference_says(operator, call)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", MIXED, ids=str)
def test_inf_and_nan_spoil_the_sum_wherever_they_are(dtype: torch.dtype, bad: float) -> None:
    # A thread takes four vectors at once, then one, then numbers.
    size = 8192 + 2048 + 3
    places = [*range(0, size, 509), *range(size - 5, size)]
    grads = [torch.ones(size, dtype=dtype) for _ in places]
    for grad, place in zip(grads, places, strict=True):
        grad[place] = bad
    found_inf, sums = torch.zeros(1), torch.zeros(len(grads), dtype=F64)
    torch.ops.apex_mp.check_(grads, [*range(len(grads))], found_inf, sums)
    assert found_inf.item() == 1
    assert not sums.isfinite().any()


@each_operator
def test_launches_that_are_full_of_chunks_are_computed(operator: str) -> None:
    # The narrow grid takes 64 chunks a launch: this makes four.
    chunk = CHUNK if operator == "check_" else SMALLEST_CHUNK
    sizes = [40 * chunk, 24 * chunk, 5, 0, 40 * chunk - 1, 30 * chunk, 0, 10 * chunk + 1]
    call = sample(operator, sizes, HALF_TO_FLOAT[operator], OFFSETS["aligned"])
    assert_computes_what_the_reference_says(operator, call)


@each_operator
def test_no_order_of_threads_or_blocks_changes_a_bit(operator: str) -> None:
    first = OPERATOR[operator].sample(A_FEW, HALF_TO_FLOAT[operator], CPU)
    calls = {order: copy_of(first) for order in ORDERS}
    for order, call in calls.items():
        choose(order=order)
        OPERATOR[operator](call)
    assert_same_calls(calls["forward"], calls["backward"])
    assert_same_calls(calls["forward"], calls["shuffled"])


@each_operator
def test_numbers_are_the_same_read_by_the_host_or_by_the_kernel(operator: str) -> None:
    call = OPERATOR[operator].sample(A_FEW, HALF_TO_FLOAT[operator], CPU)
    other = copy_of(call)
    OPERATOR[operator](call)
    choose(numbers_on_host=True)
    OPERATOR[operator](other)
    assert_same_calls(call, other)


def assert_same_calls(one: Arguments, other: Arguments) -> None:
    for name in one:
        for ours, theirs in zip(tensors_of(one[name]), tensors_of(other[name]), strict=True):
            assert_same_bits(ours, theirs)

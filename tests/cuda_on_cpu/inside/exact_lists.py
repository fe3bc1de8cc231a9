"""Lists whose tensors each end where their memory ends: AddressSanitizer sees a read behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import reference
import torch
from op_cases import (
    CHUNK,
    OPERATOR,
    SMALLEST_CHUNK,
    Arguments,
    Dtypes,
    ListCase,
    assert_is_axpby,
    fill_small_integers,
    tensors_of,
)
from tolerances import assert_same_bits
from torch import Tensor

CPU = torch.device("cpu")
Offsets = Callable[[int, int], int]  # of tensor i in list number j of a call: elements

SIZES = [*range(18), 31, 32, 33, *range(CHUNK - 17, CHUNK + 18), 2 * CHUNK - 1, 2 * CHUNK + 1]
# One vector for each thread of a block, two and four of them.
SIZES += [1023, 1024, 1025, 2047, 2048, 2049, 8191, 8192, 8200]

CHUNKS = [CHUNK, CHUNK // 2, CHUNK // 4, SMALLEST_CHUNK]
ENOUGH_CHUNKS = 528  # kChunkLimits.enough of csrc/cuda/table.h

OFFSETS: dict[str, Offsets] = {
    "aligned": lambda i, j: 0,
    "all lists off by as much": lambda i, j: i % 17,
    "each list off by another": lambda i, j: (i + 5 * j) % 17,
}


def count_chunks(sizes: Sequence[int], chunk: int) -> int:
    return sum(-(-size // chunk) for size in sizes)


def with_chunks_of(chunk: int, sizes: Sequence[int]) -> list[int]:
    """Return sizes, some of them above `chunk`, and as many ones as make chunks of that size."""
    return [*sizes, *[1] * (ENOUGH_CHUNKS - count_chunks(sizes, chunk))]


def around(chunk: int) -> list[int]:
    """Return a list that is cut into chunks of this size, with all sizes around one."""
    return with_chunks_of(chunk, [*range(chunk - 17, chunk + 18), 2 * chunk - 1, 2 * chunk + 1])


def sample(
    operator: str, sizes: Sequence[int], dtypes: Sequence[Dtypes], offsets: Offsets
) -> Arguments:
    """Return a sample call with a storage of its own, and no memory behind it, for each tensor."""
    case = ListCase("exact", [(size,) for size in sizes])
    call = OPERATOR[operator].sample(case, dtypes, CPU)
    if operator == "unscale_":
        call["sum_sq"] = None  # Where there are sums, chunks are of one size in all lists.
    if operator == "check_":  # Sums of small integers are exact.
        for tensor in call["grads"]:
            tensor.copy_(fill_small_integers(torch.empty(tensor.shape)))
    for j, name in enumerate(OPERATOR[operator].lists):
        if call[name] is not None:
            call[name] = [moved(each, offsets(i, j)) for i, each in enumerate(call[name])]
    return call


def moved(tensor: Tensor, offset: int) -> Tensor:
    # NaN before it: what reads that as well finds a number that is not finite.
    memory = torch.full((offset + tensor.numel(),), float("nan"), dtype=tensor.dtype)
    memory[offset:] = tensor
    return memory[offset:]


def assert_nothing_before_was_written(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        assert tensor.as_strided((tensor.storage_offset(),), (1,), 0).isnan().all()


def assert_computes_what_the_reference_says(operator: str, call: Arguments) -> None:
    """Call the operator, and compare all that it wrote."""
    before = call["sum_sq"].clone() if operator == "check_" else None
    OPERATOR[operator](call)
    if before is not None:
        expected = reference.sums_of_squares(call["grads"], call["places"], before)
        assert_same_bits(call["sum_sq"], expected)
    elif operator == "exponents_":
        assert_same_bits(call["counts"], reference.exponents(call["tensors"]))
    elif operator == "unscale_":
        for src, dst in zip(call["src"], call["dst"], strict=True):
            assert_same_bits(dst, reference.unscaled(src, 1 / 3, dst))
    else:
        assert operator == "axpby_", f"no reference for {operator}"
        assert_is_axpby(call)
    assert "found_inf" not in call or call["found_inf"].item() == 0
    for name in OPERATOR[operator].lists:
        assert_nothing_before_was_written(tensors_of(call[name]))

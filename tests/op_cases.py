"""The operator table: which lists of tensors, in which dtypes, and a sample call of each operator.

`LISTS` says what is in a list, `DTYPES` in which dtypes an operator gets it, `OPERATORS` how to
call it. Tests of results, CPU levels, threads, errors, versions and torch.compile all read these
tables, so a new operator is one row of the last two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import reference
import torch
from tolerances import assert_same_bits
from torch import Tensor

from apex_mp.loss_scale import DynamicLossScale
from apex_mp.scale.device_scale import DeviceScale

TILE = 512  # kTile of csrc/cpu/kernels/impl.h: what is converted at once
# What a thread or a block takes at once: kChunkSize on the CPU; on CUDA kLargestChunk, or less for
# a list of few numbers, but not less than kSmallestChunk.
CHUNK = 16384
SMALLEST_CHUNK = 2048

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATS = (F16, BF16, F32, F64)
NAMES = {F16: "fp16", BF16: "bf16", F32: "fp32", F64: "fp64", None: "none"}

Dtypes = Sequence["torch.dtype | None"]  # the dtypes of a list, in turn; None: an absent tensor
Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ListCase:
    """The shapes of a list, and how each tensor lies in memory."""

    name: str
    shapes: Sequence[Sequence[int]]
    layout: str = "contiguous"

    def __str__(self) -> str:
        return self.name


LISTS = [
    ListCase("no tensors", []),
    ListCase("an empty tensor", [(0,)]),
    ListCase("0-dim tensors", [(), ()]),
    ListCase("one element", [(1,)]),
    ListCase("below a vector", [(7,)]),
    ListCase("around a vector of 8", [(8,), (9,)]),
    ListCase("around a vector of 16", [(15,), (16,), (17,)]),
    ListCase("around 32 lanes", [(31,), (32,), (33,)]),
    ListCase("a tile less one", [(TILE - 1,)]),
    ListCase("a tile", [(TILE,)]),
    ListCase("a tile and one", [(TILE + 1,)]),
    ListCase("around the smallest chunk", [(SMALLEST_CHUNK + i,) for i in (-1, 0, 1)]),
    ListCase("a chunk less one", [(CHUNK - 1,)]),
    ListCase("a chunk", [(CHUNK,)]),
    ListCase("a chunk and one", [(CHUNK + 1,)]),
    ListCase("two chunks", [(2 * CHUNK,)]),
    ListCase("two chunks and one", [(2 * CHUNK + 1,)]),
    ListCase("chunks of many tensors", [(CHUNK + 3,), (5,), (2 * CHUNK,), (CHUNK - 1,)]),
    ListCase("empty first", [(0,), (5,), (700,)]),
    ListCase("empty in the middle", [(5,), (0, 3), (700,)]),
    ListCase("empty last", [(5,), (700,), (0,)]),
    ListCase("all empty", [(0,), (4, 0)]),
    ListCase("runs of empty tensors", [(0,), (0,), (5,), (0,), (0,), (CHUNK + 1,), (0,), (0,)]),
    ListCase("any rank", [(), (3,), (2, 5), (2, 3, 4), (1, 1, 600, 1)]),
    ListCase("off by one element", [(1,), (33,), (TILE + 1,), (CHUNK + 1,)], "offset"),
    ListCase("each list off by another", [(1,), (33,), (TILE + 1,), (CHUNK + 1,)], "uneven offset"),
    ListCase("channels last", [(2, 3, 5, 7), (4, 16, 3, 3)], "channels_last"),
    ListCase("channels last in 3d", [(2, 3, 4, 5, 6)], "channels_last_3d"),
    ListCase("transposed", [(20, 30), (2, 300)], "transposed"),
]

# Made of views of one buffer, as thousands of allocations take long. More than 4,096 tensors and
# more than fit into the table of one CUDA launch.
MANY_LISTS = [
    ListCase("2000 of 64", [(64,)] * 2000, "views"),
    ListCase("5000 of 3", [(3,)] * 5000, "views"),
]

A_FEW = ListCase("a few", [(5,), (2, 300), (), (CHUNK + 5,), (0,)])

GUARD = 64  # elements before and after each tensor that no operator may touch
SENTINEL = 777.0


def make_list(
    case: ListCase,
    dtypes: Dtypes,
    device: torch.device,
    *,
    position: int = 0,
    fill: Callable[[Tensor], Tensor] = Tensor.normal_,
) -> list[Tensor]:
    """Return the tensors of `case`, dtypes in turn, with the float32 numbers that `fill` makes.

    `position` numbers the lists of one call: each has its own offset in "uneven offset".
    """
    if case.layout == "views":
        sizes = [math.prod(shape) for shape in case.shapes]
        buffer = fill(torch.empty(sum(sizes))).to(dtypes[0]).to(device)
        return list(buffer.split(sizes))
    return [
        _make_tensor(shape, dtypes[i % len(dtypes)], case.layout, device, position, fill)
        for i, shape in enumerate(case.shapes)
    ]


def _make_tensor(
    shape: Sequence[int],
    dtype: torch.dtype | None,
    layout: str,
    device: torch.device,
    position: int,
    fill: Callable[[Tensor], Tensor],
) -> Tensor:
    assert dtype is not None
    numel = math.prod(shape)
    offset = {"offset": 1, "uneven offset": position}.get(layout, 0)
    buffer = torch.full((numel + offset + 2 * GUARD,), SENTINEL, dtype=dtype, device=device)
    body = buffer[GUARD + offset : GUARD + offset + numel]
    if layout == "transposed":
        tensor = body.view(*reversed(shape)).permute(*reversed(range(len(shape))))
    elif layout.startswith("channels_last"):  # N, C, then the rest: C is the innermost in memory
        n, c, *rest = shape
        last = len(shape) - 1
        tensor = body.view(n, *rest, c).permute(0, last, *range(1, last))
    else:
        tensor = body.view(*shape) if shape else body.view(())
    tensor.copy_(fill(torch.empty(shape)))
    return tensor


def assert_guards_intact(tensors: Sequence[Tensor]) -> None:
    """Demand that nothing around the tensors of `make_list` was written."""
    for tensor in tensors:
        room = tensor.untyped_storage().nbytes() // tensor.element_size()
        storage = tensor.as_strided((room,), (1,), 0)
        begin, end = tensor.storage_offset(), tensor.storage_offset() + tensor.numel()
        around = torch.cat([storage[:begin], storage[end:]])
        assert len(around) >= 2 * GUARD
        assert (around == SENTINEL).all(), "an operator wrote outside of its tensor"


def assert_is_axpby(call: Arguments) -> None:
    a, b = call["a"].item(), call["b"].item()
    for x, y, out in zip(call["x"], call["y"], call["out"], strict=True):
        assert_same_bits(out, reference.axpby(x, y, a, b, out))
    assert call["found_inf"].item() == 0


def fill_positive(tensor: Tensor) -> Tensor:
    """Fill with what a second moment may be."""
    return tensor.uniform_(0.1, 2.0)


def fill_small_integers(tensor: Tensor) -> Tensor:
    """Fill with 1, 2 and 3 and their negatives: sums of their squares are exact in any order."""
    tensor.random_(1, 4)
    return tensor.mul_(torch.randint(0, 2, tensor.shape) * 2 - 1)


# --- Which dtypes an operator gets: one tuple for each list of its call, in the order of the call.

EACH = [((dtype,),) for dtype in FLOATS]
MIXED = FLOATS
DTYPES: dict[str, list[Sequence[Dtypes]]] = {
    "check_": [*EACH, (MIXED,)],
    "exponents_": [*EACH, (MIXED,)],
    # src, dst
    "unscale_": [
        *[((src,), (dst,)) for src in FLOATS for dst in FLOATS],
        (MIXED, MIXED[::-1]),
    ],
    # x, y, out
    "axpby_": [
        ((F32,), (F32,), (F32,)),
        ((F16,), (F16,), (F16,)),
        ((BF16,), (BF16,), (BF16,)),
        ((F64,), (F64,), (F64,)),
        ((F16,), (F32,), (F32,)),
        ((F32,), (BF16,), (F16,)),
        ((F16,), (F64,), (F32,)),
        ((F16,), (BF16,), (F64,)),
        (MIXED, MIXED[::-1], MIXED[1:]),
    ],
}


def name_of(dtypes: Sequence[Dtypes]) -> str:
    return "-".join("+".join(NAMES[dtype] for dtype in each) for each in dtypes)


# --- How an operator is called: samples with every argument of the schema, by name.


def number(value: float, device: torch.device, dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def places_of(count: int) -> list[int]:
    """Places of sums, with others before, between and behind them."""
    return [2 * i + 1 for i in range(count)]


def sample_check(case: ListCase, dtypes: Sequence[Dtypes], device: torch.device) -> Arguments:
    grads = make_list(case, dtypes[0], device)
    return {
        "grads": grads,
        "places": places_of(len(grads)),
        "found_inf": torch.zeros(1, device=device),
        "sum_sq": torch.full((2 * len(grads) + 1,), SENTINEL, dtype=F64, device=device),
    }


def sample_unscale(case: ListCase, dtypes: Sequence[Dtypes], device: torch.device) -> Arguments:
    return {
        "src": make_list(case, dtypes[0], device),
        "dst": make_list(case, dtypes[1], device, position=1),
        "inv_scale": number(1 / 3, device, F64),
        "found_inf": torch.zeros(1, device=device),
        "places": places_of(len(case.shapes)),
        "sum_sq": torch.full((2 * len(case.shapes) + 1,), SENTINEL, dtype=F64, device=device),
    }


def sample_axpby(case: ListCase, dtypes: Sequence[Dtypes], device: torch.device) -> Arguments:
    return {
        "x": make_list(case, dtypes[0], device),
        "y": make_list(case, dtypes[1], device, position=1),
        "out": make_list(case, dtypes[2], device, position=2),
        "a": number(0.3, device),
        "b": number(-1.7, device, F64),
        "found_inf": torch.zeros(1, device=device),
        "tested": -1,
    }


def sample_exponents(case: ListCase, dtypes: Sequence[Dtypes], device: torch.device) -> Arguments:
    tensors = make_list(case, dtypes[0], device)
    return {
        "tensors": tensors,
        "counts": torch.zeros(len(tensors), 256, dtype=torch.int64, device=device),
    }


def sample_update_scale(
    case: ListCase, dtypes: Sequence[Dtypes], device: torch.device
) -> Arguments:
    return {
        "state": DeviceScale(DynamicLossScale(1024.0, good_steps=1, overflows=1), device).state,
        "rule": [*DynamicLossScale(growth_interval=3, min_scale=1.0, hysteresis=2).rule],
        "found_inf": torch.ones(1, device=device),
    }


@dataclasses.dataclass(frozen=True)
class Operator:
    """How to call an operator, and which of its arguments it writes."""

    name: str
    sample: Callable[[ListCase, Sequence[Dtypes], torch.device], Arguments]
    lists: tuple[str, ...]
    written: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.apex_mp, self.name).default

    def __call__(self, arguments: Arguments) -> None:
        self.overload(**arguments)

    @property
    def dtypes(self) -> list[Sequence[Dtypes]]:
        return DTYPES.get(self.name, [()])


OPERATORS = [
    Operator("check_", sample_check, ("grads",), ("found_inf", "sum_sq")),
    Operator("unscale_", sample_unscale, ("src", "dst"), ("dst", "found_inf", "sum_sq")),
    Operator("axpby_", sample_axpby, ("x", "y", "out"), ("out", "found_inf")),
    Operator("exponents_", sample_exponents, ("tensors",), ("counts",)),
    Operator("update_scale_", sample_update_scale, (), ("state",)),
]
OPERATOR = {operator.name: operator for operator in OPERATORS}


def tensors_of(argument: Any) -> list[Tensor]:
    """Return the tensors in one argument: itself, those of a list, or none."""
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, list):
        return [each for each in argument if isinstance(each, Tensor)]
    return []


def copy_of(arguments: Arguments) -> Arguments:
    """Return the same call with clones of all tensors, strides kept."""

    def clone(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return argument.detach().clone()
        if isinstance(argument, list):
            return [clone(each) for each in argument]
        return argument

    return {name: clone(argument) for name, argument in arguments.items()}

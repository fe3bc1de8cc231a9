"""Every operator computes what the reference says, for every list and dtype of the table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import reference
import torch
from op_cases import (
    A_FEW,
    BF16,
    CHUNK,
    DTYPES,
    F16,
    F32,
    F64,
    FLOATS,
    LISTS,
    MANY_LISTS,
    NAMES,
    OPERATOR,
    TILE,
    Arguments,
    Dtypes,
    ListCase,
    assert_guards_intact,
    assert_is_axpby,
    copy_of,
    fill_small_integers,
    make_list,
    name_of,
    number,
    tensors_of,
)
from tolerances import (
    SUM_OF_SQUARES_TOLERANCES,
    assert_near,
    assert_same_bits,
)
from torch import Tensor

from apex_mp.core import ops
from apex_mp.loss_scale import FLOAT32_MAX, INT32_MAX, DynamicLossScale
from apex_mp.scale.device_scale import DeviceScale


def each_list_and_dtype(operator: str) -> pytest.MarkDecorator:
    rows = list(itertools.product(LISTS, DTYPES[operator]))
    rows += [(case, DTYPES[operator][0]) for case in MANY_LISTS]
    ids = [f"{case}-{name_of(dtypes)}" for case, dtypes in rows]
    return pytest.mark.parametrize(("case", "dtypes"), rows, ids=ids)


def each_dtypes(rows: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtypes", rows, ids=name_of)


each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
each_cpu_level = pytest.mark.usefixtures("cpu_level")


def assert_only_wrote(operator: str, case: ListCase, before: Arguments, after: Arguments) -> None:
    """Demand that what an operator only reads, and the memory around its lists, is as before."""
    for name in before.keys() - set(OPERATOR[operator].written):
        for old, new in zip(tensors_of(before[name]), tensors_of(after[name]), strict=True):
            assert_same_bits(new, old)
    if case.layout != "views":
        for name in OPERATOR[operator].lists:
            assert_guards_intact(tensors_of(after[name]))


# --- check_


@each_list_and_dtype("check_")
def test_check_sums_every_square_exactly_once(
    case: ListCase, dtypes: list[Dtypes], device: torch.device
) -> None:
    call = OPERATOR["check_"].sample(case, dtypes, device)
    for grad in call["grads"]:
        grad.copy_(fill_small_integers(torch.empty(grad.shape)))
    before = copy_of(call)
    ops.check_(**call)
    expected = reference.sums_of_squares(call["grads"], call["places"], before["sum_sq"])
    assert_same_bits(call["sum_sq"].cpu(), expected)
    assert call["found_inf"].item() == 0
    assert_only_wrote("check_", case, before, call)


@each_cpu_level
@pytest.mark.parametrize("value", [1e30, -3e38, 2e19])
def test_check_squares_large_finite_numbers_without_overflow(
    value: float, device: torch.device
) -> None:
    grads = [torch.full((TILE + 1,), value, device=device), torch.ones(3, device=device)]
    found_inf, sum_sq = torch.zeros(1, device=device), torch.zeros(2, dtype=F64, device=device)
    ops.check_(grads, [0, 1], found_inf, sum_sq)
    assert found_inf.item() == 0
    expected = (TILE + 1) * grads[0][0].double().item() ** 2
    assert sum_sq.tolist() == [pytest.approx(expected, rel=1e-12), 3.0]


@each_cpu_level
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_check_does_not_take_an_overflowing_sum_for_an_overflowing_gradient(
    dtype: torch.dtype, device: torch.device
) -> None:
    largest = torch.finfo(dtype).max
    found_inf, sum_sq = torch.zeros(1, device=device), torch.zeros(1, dtype=F64, device=device)
    ops.check_([torch.full((9,), largest, dtype=dtype, device=device)], [0], found_inf, sum_sq)
    assert found_inf.item() == 0


# --- exponents_


@each_list_and_dtype("exponents_")
@each_cpu_level
def test_exponents_counts_every_number_exactly_once(
    case: ListCase, dtypes: list[Dtypes], device: torch.device
) -> None:
    call = OPERATOR["exponents_"].sample(case, dtypes, device)
    before = copy_of(call)
    for _ in range(2):  # The second adds to the first.
        ops.exponents_(**call)
    assert_same_bits(call["counts"].cpu(), 2 * reference.exponents(call["tensors"]))
    assert_only_wrote("exponents_", case, before, call)


@each_dtype
@each_cpu_level
def test_exponents_counts_every_number_of_a_dtype_in_its_bin(
    dtype: torch.dtype, device: torch.device
) -> None:
    if dtype in (F16, BF16):
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        powers = torch.arange(-1080.0, 1030.0, dtype=F64)
        edges = torch.cat([torch.exp2(powers), torch.tensor([0.0, 1e-310], dtype=F64)])
        around = [edges, edges.nextafter(edges * 2), edges.nextafter(edges * 0), -edges]
        special = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=F64)
        numbers = torch.cat([*around, special]).to(dtype)
    counts = torch.zeros(1, 256, dtype=torch.int64, device=device)
    ops.exponents_([numbers.to(device)], counts)
    assert_same_bits(counts.cpu(), reference.exponents([numbers]))
    assert counts.sum().item() == numbers.numel()


# --- inf and NaN, wherever they are


PLACES = {
    "in the first element": (0, 0),
    "in the last element of a tensor": (0, -1),
    "at the end of a tile": (0, TILE - 1),
    "in the second chunk": (0, CHUNK),
    "in the middle tensor": (1, 3),
    "in the last tensor": (-1, 0),
}
each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
BAD_NUMBERS = [float("inf"), float("-inf"), float("nan")]
each_bad_number = pytest.mark.parametrize("bad", BAD_NUMBERS)
LONG_SHAPES = [(CHUNK + 7,), (0,), (700,), (1,)]
each_long_list = pytest.mark.parametrize(
    "long_list",
    [ListCase("aligned", LONG_SHAPES), ListCase("misaligned", LONG_SHAPES, "uneven offset")],
    ids=str,
)
LONG_LIST_PLACES_MIDDLE = 2


def plant(tensors: list[Tensor], place: tuple[int, int], bad: float) -> int:
    """Put a bad number into one of the tensors and return which one."""
    index, element = place
    index = {1: LONG_LIST_PLACES_MIDDLE, -1: len(tensors) - 1}.get(index, index)
    tensors[index][element] = bad
    return index


@each_bad_number
@each_place
@each_long_list
@each_dtype
def test_check_finds_inf_and_nan(
    dtype: torch.dtype,
    long_list: ListCase,
    place: tuple[int, int],
    bad: float,
    device: torch.device,
) -> None:
    call = OPERATOR["check_"].sample(long_list, [(dtype,)], device)
    where = plant(call["grads"], place, bad)
    ops.check_(**call)
    assert call["found_inf"].item() == 1
    assert (~call["sum_sq"].isfinite()).nonzero().tolist() == [[call["places"][where]]]


@each_bad_number
@each_place
@each_long_list
@each_dtype
def test_unscale_finds_inf_and_nan_and_passes_them_on(
    dtype: torch.dtype,
    long_list: ListCase,
    place: tuple[int, int],
    bad: float,
    device: torch.device,
) -> None:
    call = OPERATOR["unscale_"].sample(long_list, [(dtype,), (F32,)], device)
    where = plant(call["src"], place, bad)
    ops.unscale_(**call)
    assert call["found_inf"].item() == 1
    assert (~call["sum_sq"].isfinite()).nonzero().tolist() == [[call["places"][where]]]
    for src, dst in zip(call["src"], call["dst"], strict=True):
        assert_same_bits(dst, reference.unscaled(src, 1 / 3, dst))


@each_bad_number
@each_place
@each_long_list
@each_dtype
@pytest.mark.parametrize("where", ["x", "y"])
def test_axpby_finds_inf_and_nan_in_what_it_is_to_test(
    where: str,
    dtype: torch.dtype,
    long_list: ListCase,
    place: tuple[int, int],
    bad: float,
    device: torch.device,
) -> None:
    call = OPERATOR["axpby_"].sample(long_list, [(dtype,), (dtype,), (F32,)], device)
    plant(call[where], place, bad)
    for tested in (-1, 0, 1):
        call["found_inf"].zero_()
        ops.axpby_(**(call | {"tested": tested}))
        counts = tested == -1 or "xy"[tested] == where
        assert call["found_inf"].item() == (1 if counts else 0)
    a, b = call["a"].item(), call["b"].item()
    for x, y, out in zip(call["x"], call["y"], call["out"], strict=True):
        assert_same_bits(out, reference.axpby(x, y, a, b, out))


@pytest.mark.parametrize(
    ("value", "factor", "dtype"),
    [(1e6, 1.0, F16), (1e30, 1e10, F32)],
    ids=["rounded to inf", "multiplied to inf"],
)
def test_unscale_tests_the_sources_and_not_the_results(
    value: float, factor: float, dtype: torch.dtype, device: torch.device
) -> None:
    src, dst = torch.full((5,), value, device=device), torch.zeros(5, dtype=dtype, device=device)
    found_inf = torch.zeros((), device=device)
    ops.unscale_([src], [dst], number(factor, device), found_inf)
    assert dst.isinf().all()
    assert found_inf.item() == 0


# --- unscale_ and axpby_


@each_list_and_dtype("unscale_")
def test_unscale_multiplies_and_rounds_once(
    case: ListCase, dtypes: list[Dtypes], device: torch.device
) -> None:
    call = OPERATOR["unscale_"].sample(case, dtypes, device)
    before = copy_of(call)
    ops.unscale_(**call)
    for src, dst in zip(call["src"], call["dst"], strict=True):
        assert_same_bits(dst, reference.unscaled(src, 1 / 3, dst))
    assert call["found_inf"].item() == 0
    assert_only_wrote("unscale_", case, before, call)


@each_list_and_dtype("unscale_")
@each_cpu_level
def test_unscale_sums_every_square_that_it_writes_exactly_once(
    case: ListCase, dtypes: list[Dtypes], device: torch.device
) -> None:
    call = OPERATOR["unscale_"].sample(case, dtypes, device)
    for src in call["src"]:
        src.copy_(fill_small_integers(torch.empty(src.shape)))
    call["inv_scale"].fill_(2.0)
    before = call["sum_sq"].clone()
    ops.unscale_(**call)
    expected = reference.sums_of_squares(call["dst"], call["places"], before)
    assert_same_bits(call["sum_sq"].cpu(), expected)


@each_cpu_level
@each_dtypes([((src,), (dst,)) for src in FLOATS for dst in FLOATS])
def test_unscale_sums_what_it_has_written(dtypes: list[Dtypes], device: torch.device) -> None:
    call = OPERATOR["unscale_"].sample(A_FEW, dtypes, device)
    call["inv_scale"].fill_(2.0**-22)  # Most become denormal in float16, and are rounded.
    before = call["sum_sq"].clone()
    ops.unscale_(**call)
    expected = reference.sums_of_squares(call["dst"], call["places"], before)
    assert_near(call["sum_sq"].cpu(), expected, SUM_OF_SQUARES_TOLERANCES[dtypes[1][0]])


@pytest.mark.parametrize("dst_dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize(
    ("src_dtype", "tiny"),
    [(F16, 2.0**-24), (BF16, 2.0**-133), (F32, 1e-42), (F64, 5e-324)],
    ids=["fp16", "bf16", "fp32", "fp64"],
)
def test_unscale_keeps_denormal_numbers(
    src_dtype: torch.dtype, tiny: float, dst_dtype: torch.dtype, device: torch.device
) -> None:
    src = torch.full((TILE + 3,), tiny, dtype=src_dtype, device=device)
    dst = torch.ones(TILE + 3, dtype=dst_dtype, device=device)
    ops.unscale_([src], [dst], number(1.0, device), torch.zeros(1, device=device))
    assert src[0].item() != 0
    assert_same_bits(dst, src.to(dst_dtype))


@each_list_and_dtype("axpby_")
def test_axpby_adds_two_rounded_products(
    case: ListCase, dtypes: list[Dtypes], device: torch.device
) -> None:
    call = OPERATOR["axpby_"].sample(case, dtypes, device)
    before = copy_of(call)
    ops.axpby_(**call)
    assert_is_axpby(call)
    assert_only_wrote("axpby_", case, before, call)


@each_cpu_level
@pytest.mark.parametrize("x", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("y", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("out", FLOATS, ids=NAMES.get)
def test_axpby_takes_any_dtypes(
    x: torch.dtype, y: torch.dtype, out: torch.dtype, device: torch.device
) -> None:
    dtypes = [(x,), (y,), (out,)]
    call = OPERATOR["axpby_"].sample(ListCase("a list", [(TILE + 9,)]), dtypes, device)
    ops.axpby_(**call)
    assert_is_axpby(call)


# --- Memory


def strided(shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.empty_strided(shape, strides, device=device).normal_()


@pytest.mark.parametrize(
    ("shape", "strides", "other_strides"),
    [
        ((3, 1), (1, 1), (1, 77)),
        ((1, 3, 1), (3, 1, 1), (9, 1, 9)),
        ((2, 3, 1), (1, 2, 6), (1, 2, 77)),  # Not contiguous, either of them.
        ((4, 0, 3), (3, 3, 1), (5, 7, 9)),  # No element is anywhere.
        ((1, 1), (1, 1), (5, 7)),
    ],
)
def test_strides_that_no_element_needs_mean_nothing(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_strides: tuple[int, ...],
    device: torch.device,
) -> None:
    src, dst = strided(shape, strides, device), strided(shape, other_strides, device)
    ops.unscale_([src], [dst], number(0.5, device), torch.zeros(1, device=device))
    assert_same_bits(dst, src * 0.5)
    assert dst.stride() == other_strides


# --- l2_norm


@each_list_and_dtype("check_")
def test_l2_norm_is_that_of_all_elements(
    case: ListCase, dtypes: list[Dtypes], device: torch.device
) -> None:
    tensors = make_list(case, dtypes[0], device, fill=fill_small_integers)
    norm, norms = ops.l2_norms(tensors)
    # The sums are exact; torch's square root of float64 may be off in the last bit.
    each = [reference.l2_norm([tensor]) for tensor in tensors]
    expected = torch.tensor([reference.l2_norm(tensors), *each], dtype=norm.dtype)
    found = torch.cat([norm.view(1), norms]).cpu()
    torch.testing.assert_close(found, expected, rtol=2.0**-52, atol=0.0)
    assert_same_bits(ops.l2_norm(tensors), norm)
    if case.layout != "views":
        assert_guards_intact(tensors)


@pytest.mark.parametrize(
    ("dtypes", "result"), [([F16, BF16, F32], F32), ([F16, F64], F64), ([], F32)]
)
def test_l2_norm_is_float64_if_a_tensor_is(
    dtypes: list[torch.dtype], result: torch.dtype, device: torch.device
) -> None:
    tensors = [torch.ones(3, dtype=dtype, device=device) for dtype in dtypes]
    norm, norms = ops.l2_norms(tensors)
    assert norm.shape == ()
    assert norms.shape == (len(dtypes),)
    assert norm.dtype == norms.dtype == result


# --- update_scale_


RULES = {
    **{
        f"interval {interval}, hysteresis {hysteresis}": DynamicLossScale(
            1024.0, growth_interval=interval, hysteresis=hysteresis
        )
        for interval in (1, 2, 3)
        for hysteresis in (1, 2, 3)
    },
    "bounds": DynamicLossScale(8.0, growth_interval=2, min_scale=2.0, max_scale=24.0),
    "starts below min_scale": DynamicLossScale(1.0, growth_interval=1, min_scale=4.0),
    "starts above max_scale": DynamicLossScale(64.0, growth_interval=1, max_scale=4.0),
    "odd factors": DynamicLossScale(
        1000.0, growth_interval=1, growth_factor=1.001, backoff_factor=0.7
    ),
    "near the largest float32": DynamicLossScale(2.0**126, growth_interval=1),
    "factor near the largest float32": DynamicLossScale(
        FLOAT32_MAX, growth_interval=1, growth_factor=1.0000001
    ),
    "near the smallest": DynamicLossScale(2.0**-124, growth_interval=1),
    "never grows": DynamicLossScale(4.0, growth_factor=1.0, growth_interval=1, max_scale=4.0),
    "counts read from a file": DynamicLossScale(
        4.0, growth_interval=3, hysteresis=2, good_steps=INT32_MAX, overflows=INT32_MAX
    ),
    "largest counts": DynamicLossScale(
        4.0,
        growth_interval=INT32_MAX,
        hysteresis=INT32_MAX,
        good_steps=INT32_MAX - 4,
        overflows=INT32_MAX - 4,
    ),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_update_scale_is_the_rule_of_loss_scale(
    rule: DynamicLossScale, device: torch.device
) -> None:
    # Every state that some overflow sequence of length 12 reaches, and both ways on from it.
    states, front = {rule}, {rule}
    for _ in range(12):
        reached = {state.update(found_inf) for state in front for found_inf in (False, True)}
        for state, found_inf in itertools.product(front, (False, True)):
            assert_updates_like(state, found_inf, device)
        front = reached - states
        states |= reached


def assert_updates_like(state: DynamicLossScale, found_inf: bool, device: torch.device) -> None:
    scale = DeviceScale(state, device)
    ops.update_scale_(scale.state, state.rule, torch.tensor([float(found_inf)], device=device))
    assert scale.read() == state.update(found_inf)


@pytest.mark.parametrize("found_inf", [1.0, 0.5, -1.0, float("nan"), float("inf")])
def test_update_scale_takes_any_found_inf_but_zero_for_an_overflow(
    found_inf: float, device: torch.device
) -> None:
    call = OPERATOR["update_scale_"].sample(A_FEW, (), device)
    call["found_inf"].fill_(found_inf)
    ops.update_scale_(**call)
    assert call["state"][0].item() == 512.0

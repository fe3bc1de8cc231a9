"""Wrong input raises a sentence (operator, list, index, value, wish) and changes no tensor."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import (
    F16,
    F32,
    F64,
    OPERATOR,
    OPERATORS,
    Arguments,
    ListCase,
    Operator,
    copy_of,
    tensors_of,
)
from tolerances import assert_same_bits
from torch import Tensor

from apex_mp.loss_scale import Rule

# The call that each row breaks in one place. 4-dimensional, so that memory orders can differ.
SOUND = ListCase("sound", [(2, 3, 2, 2), (2, 3, 2, 2), (2, 3, 2, 2)])
SHAPE = (2, 3, 2, 2)
DTYPES_OF_SOUND_CALL = {
    "check_": [(F16,)],
    "unscale_": [(F16,), (F32,)],
    "axpby_": [(F16,), (F32,), (F32,)],
    "exponents_": [(F16,)],
    "update_scale_": [],
}


def sound_call(operator: Operator, device: torch.device) -> Arguments:
    return operator.sample(SOUND, DTYPES_OF_SOUND_CALL[operator.name], device)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One argument, or one tensor of a list, made wrong; and what the message must say."""

    operator: str
    where: str  # "found_inf" or "grads[1]"
    what: str
    spoil: Callable[[Any], Any]
    message: str  # a regular expression; what comes before it, "operator: where", is checked too

    def __str__(self) -> str:
        return f"{self.operator}: {self.where} {self.what}"

    def spoil_call(self, call: Arguments) -> None:
        name, index = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", self.where).groups()
        if index is None:
            call[name] = self.spoil(call[name])
        else:
            call[name] = list(call[name])
            call[name][int(index)] = self.spoil(call[name][int(index)])


# --- Ways to spoil an argument.


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def expanded(tensor: Tensor) -> Tensor:
    return tensor.flatten()[0].expand(tensor.shape)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def one_element_less(tensor: Tensor) -> Tensor:
    return tensor.flatten()[:-1]


def two_elements(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.flatten(), tensor.flatten()])


def no_elements(tensor: Tensor) -> Tensor:
    return tensor.flatten()[:0]


def one_tensor_less(tensors: list[Tensor]) -> list[Tensor]:
    return tensors[:-1]


def one_tensor_more(tensors: list[Tensor]) -> list[Tensor]:
    return [*tensors, tensors[0].clone()]


def set_to(value: Any) -> Callable[[Any], Any]:
    return lambda old: value


# --- The table.

FLOATING = "it must be Half or BFloat16 or Float or Double"
DENSE = "its elements must lie in memory without gaps or overlap, make it contiguous"


def faults_of_list(operator: str, name: str, *, paired_with: str | None) -> list[Fault]:
    """What may be wrong with any list of tensors, and with one that goes along with another."""
    first, last = f"{name}[0]", f"{name}[2]"
    faults = [
        Fault(operator, last, "int32", cast(torch.int32), f"is of dtype Int; {FLOATING}"),
        Fault(operator, first, "bool", cast(torch.bool), f"is of dtype Bool; {FLOATING}"),
        Fault(
            operator, last, "complex", cast(torch.complex64), "is of dtype ComplexFloat; it must"
        ),
        Fault(operator, first, "with gaps", with_gaps, rf"has sizes \[2, 3, 2, 2\] and .*{DENSE}"),
        Fault(operator, last, "expanded", expanded, rf"strides \[0, 0, 0, 0\]; {DENSE}"),
    ]
    if paired_with is None:
        return faults
    return faults + [
        Fault(
            operator,
            name,
            "too short",
            one_tensor_less,
            f"has 2 tensors, {paired_with} has 3; they must match",
        ),
        Fault(
            operator,
            name,
            "too long",
            one_tensor_more,
            f"has 4 tensors, {paired_with} has 3; they must match",
        ),
        Fault(
            operator,
            last,
            "too small",
            one_element_less,
            rf"has 23 elements, {paired_with}\[2\] has 24; they must match",
        ),
        Fault(
            operator,
            last,
            "in another order",
            channels_last,
            rf"has sizes .*, {paired_with}\[2\] has .*; they must lie in memory in the same order",
        ),
    ]


def faults_of_number(operator: str, name: str) -> list[Fault]:
    """What may be wrong with a tensor of one float32 or float64 element that is read."""
    wish = "it must be Float or Double"
    return [
        Fault(operator, name, "int64", cast(torch.int64), f"is of dtype Long; {wish}"),
        Fault(operator, name, "fp16", cast(F16), f"is of dtype Half; {wish}"),
        Fault(operator, name, "of two", two_elements, "has 2 elements; it must have 1"),
        Fault(operator, name, "empty", no_elements, "has 0 elements; it must have 1"),
    ]


def faults_of_one_element(operator: str, name: str, wish: str) -> list[Fault]:
    """What may be wrong with a tensor of one element and one dtype."""
    return [
        Fault(operator, name, "fp64", cast(F64), f"is of dtype Double; it must be {wish}"),
        Fault(operator, name, "bool", cast(torch.bool), f"is of dtype Bool; it must be {wish}"),
        Fault(operator, name, "of two", two_elements, "has 2 elements; it must have 1"),
        Fault(operator, name, "empty", no_elements, "has 0 elements; it must have 1"),
    ]


FAULTS = [
    *faults_of_list("check_", "grads", paired_with=None),
    *faults_of_one_element("check_", "found_inf", "Float"),
    Fault(
        "check_",
        "grads",
        "too short",
        one_tensor_less,
        "has 2 tensors, places has 3; they must match",
    ),
    Fault(
        "check_",
        "places[2]",
        "too large",
        set_to(7),
        "is 7; it must be an index into sum_sq, which has 7 elements",
    ),
    Fault("check_", "places[0]", "negative", set_to(-1), "is -1; it must be an index into sum_sq"),
    Fault("check_", "places[1]", "again", set_to(1), "is 1; it must be more than the one before"),
    Fault("check_", "sum_sq", "fp32", cast(F32), "is of dtype Float; it must be Double"),
    Fault("check_", "sum_sq", "with gaps", with_gaps, DENSE),
    Fault("check_", "sum_sq", "expanded", expanded, DENSE),
    *faults_of_list("unscale_", "src", paired_with=None),
    *faults_of_list("unscale_", "dst", paired_with="src"),
    *faults_of_number("unscale_", "inv_scale"),
    *faults_of_one_element("unscale_", "found_inf", "Float"),
    Fault("unscale_", "sum_sq", "fp32", cast(F32), "is of dtype Float; it must be Double"),
    Fault("unscale_", "sum_sq", "with gaps", with_gaps, DENSE),
    Fault("unscale_", "sum_sq", "expanded", expanded, DENSE),
    Fault("unscale_", "places[2]", "too large", set_to(7), "is 7; it must be an index into sum_sq"),
    Fault("unscale_", "src", "too short", one_tensor_less, "has 2 tensors, places has 3"),
    *faults_of_list("axpby_", "x", paired_with=None),
    *faults_of_list("axpby_", "y", paired_with="x"),
    *faults_of_list("axpby_", "out", paired_with="x"),
    *faults_of_number("axpby_", "a"),
    *faults_of_number("axpby_", "b"),
    *faults_of_one_element("axpby_", "found_inf", "Float"),
    Fault("axpby_", "tested", "2", set_to(2), r"is 2; it must be -1 \(both\), 0 \(x\) or 1 \(y\)"),
    Fault("axpby_", "tested", "-2", set_to(-2), "is -2; it must be -1"),
    *faults_of_list("exponents_", "tensors", paired_with=None),
    Fault("exponents_", "counts", "int32", cast(torch.int32), "is of dtype Int; it must be Long"),
    Fault("exponents_", "counts", "with gaps", with_gaps, DENSE),
    Fault("exponents_", "counts", "expanded", expanded, DENSE),
    *[
        Fault("exponents_", "counts", what, spoil, "has sizes .*; it must be contiguous, of 3 rows")
        for what, spoil in {
            "too short": lambda counts: counts[:-1],
            "too narrow": lambda counts: counts[:, :128].contiguous(),
            "flat": Tensor.flatten,
            "transposed": lambda counts: counts.t().contiguous().t(),
        }.items()
    ],
    Fault("update_scale_", "state", "fp64", cast(F64), "is of dtype Double; it must be Float"),
    Fault("update_scale_", "state", "of six", two_elements, "has 6 elements; it must have 3"),
    Fault("update_scale_", "state", "with gaps", with_gaps, DENSE),
    *faults_of_one_element("update_scale_", "found_inf", "Float"),
    Fault("update_scale_", "rule", "short", lambda rule: rule[:5], "has 5 numbers; it must have 6"),
]


def snapshot(call: Arguments) -> list[Tensor]:
    return [tensor for argument in call.values() for tensor in tensors_of(argument)]


def assert_refuses(
    operator: Operator, call: Arguments, message: str, error: type[Exception] = RuntimeError
) -> None:
    before = snapshot(copy_of(call))
    versions = [tensor._version for tensor in snapshot(call)]
    with pytest.raises(error, match=message):
        operator(call)
    for old, new in zip(before, snapshot(call), strict=True):
        if old.device.type != "meta":
            assert_same_bits(new, old)
    assert [tensor._version for tensor in snapshot(call)] == versions


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_named_and_nothing_is_written(fault: Fault, device: torch.device) -> None:
    operator = OPERATOR[fault.operator]
    call = sound_call(operator, device)
    fault.spoil_call(call)
    where = re.escape(f"{fault.operator}: {fault.where} ")
    assert_refuses(operator, call, f"^{where}.*{fault.message}")


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_the_call_that_the_faults_spoil_is_sound(operator: Operator, device: torch.device) -> None:
    call = sound_call(operator, device)
    before = [t._version for name in operator.written for t in tensors_of(call[name])]
    operator(call)
    after = [t._version for name in operator.written for t in tensors_of(call[name])]
    assert all(new > old for new, old in zip(after, before, strict=True))


# --- Memory: what is written may be what is read, and must not overlap it otherwise.


OVERLAPS = [("unscale_", "dst", "src"), ("axpby_", "out", "x"), ("axpby_", "out", "y")]
overlaps = pytest.mark.parametrize(("operator", "written", "read"), OVERLAPS)


def call_on_one_buffer(
    operator: str, written: str, read: str, device: torch.device, *, begin: int, written_dtype: Any
) -> Arguments:
    """Return a call whose last `written` tensor begins `begin` elements after the last `read`."""
    call = sound_call(OPERATOR[operator], device)
    buffer = torch.randn(24 * 8, device=device)
    call[read][2] = buffer[64:88].view(SHAPE)
    elements = buffer.view(written_dtype)
    first = 64 * 4 // elements.element_size() + begin
    call[written][2] = elements[first : first + 24].view(SHAPE)
    return call


@pytest.mark.parametrize(
    ("begin", "written_dtype"),
    [(1, F32), (-1, F32), (23, F32), (-23, F32), (0, F16), (47, F16), (-23, F16), (0, F64)],
    ids=str,
)
@overlaps
def test_memory_that_overlaps_what_is_read_is_refused(
    operator: str, written: str, read: str, begin: int, written_dtype: Any, device: torch.device
) -> None:
    call = call_on_one_buffer(
        operator, written, read, device, begin=begin, written_dtype=written_dtype
    )
    message = rf"^{operator}: {written}\[2\] overlaps {read}\[2\]; they must be the same memory or"
    assert_refuses(OPERATOR[operator], call, message)


@pytest.mark.parametrize(
    ("begin", "written_dtype"),
    [(0, F32), (24, F32), (-24, F32), (48, F16), (-24, F16), (12, F64), (-24, F64)],
    ids=str,
)
@overlaps
def test_the_same_memory_and_neighbours_are_taken(
    operator: str, written: str, read: str, begin: int, written_dtype: Any, device: torch.device
) -> None:
    call = call_on_one_buffer(
        operator, written, read, device, begin=begin, written_dtype=written_dtype
    )
    apart = copy_of(call)
    OPERATOR[operator](call)
    OPERATOR[operator](apart)
    for ours, expected in zip(call[written], apart[written], strict=True):
        assert_same_bits(ours, expected)


# --- Every list, and every single tensor, of every operator: what dispatch or autograd refuses.

LISTS_OF_OPERATORS = [(each, name) for each in OPERATORS for name in each.lists]
each_list = pytest.mark.parametrize(
    ("operator", "name"),
    LISTS_OF_OPERATORS,
    ids=[f"{op}-{name}" for op, name in LISTS_OF_OPERATORS],
)
TENSORS = {
    "check_": ("found_inf", "sum_sq"),
    "unscale_": ("inv_scale", "found_inf", "sum_sq"),
    "axpby_": ("a", "b", "found_inf"),
    "exponents_": ("counts",),
    "update_scale_": ("state", "found_inf"),
}
each_tensor = pytest.mark.parametrize(
    ("operator", "name"), [(OPERATOR[op], name) for op, names in TENSORS.items() for name in names]
)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
@pytest.mark.parametrize("to_sparse", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=["coo", "csr"])
@each_list
def test_a_sparse_tensor_in_a_list_is_refused(
    operator: Operator,
    name: str,
    to_sparse: Callable[[Tensor], Tensor],
    device: torch.device,
    request: pytest.FixtureRequest,
) -> None:
    matrices = ListCase("two matrices", [(4, 4), (4, 4)])
    call = operator.sample(matrices, DTYPES_OF_SOUND_CALL[operator.name], device)
    call[name][1] = to_sparse(torch.eye(4, dtype=call[name][1].dtype, device=device))
    refusal = r"is (a sparse tensor|Sparse(Csr)?); it must be a dense \(strided\)"
    assert_refuses(operator, call, rf"^{operator.name}: {name}\[1\] {refusal}")


OPTIONS = {
    "growth_factor": [0.5],
    "backoff_factor": [1.0, 0.0],
    "growth_interval": [0, -1, 2**31],
    "min_scale": [0.0],
    "max_scale": [0.5],  # Less than min_scale, which is 1.
    "hysteresis": [0, -1, 2**31],
}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (option, value)
        for option, values in OPTIONS.items()
        for value in (*values, float("-inf"), float("nan"))
    ],
)
def test_a_number_of_a_rule_out_of_range_is_refused(
    option: str, value: float, device: torch.device
) -> None:
    call = sound_call(OPERATOR["update_scale_"], device)
    call["rule"][Rule._fields.index(option)] = value
    wish = f"^update_scale_: {option} is .*; it must be "
    assert_refuses(OPERATOR["update_scale_"], call, wish)


@pytest.mark.cuda_only
@each_tensor
def test_a_single_tensor_on_another_device_is_refused_unless_it_is_a_number(
    operator: Operator, name: str, device: torch.device
) -> None:
    call = sound_call(operator, device)
    call[name] = call[name].cpu()
    if name in ("inv_scale", "lr", "a", "b"):
        operator(call)
    else:
        assert_refuses(operator, call, rf"^{operator.name}: .* is on .*; all tensors of this call")


# --- Kinds of tensors that other parts of torch have, in every list.


@pytest.mark.parametrize(
    ("operator", "name"),
    [(op, name) for op in OPERATORS for name in op.lists],
)
def test_a_negation_that_torch_puts_off_is_read_and_never_written(
    operator: Operator, name: str, device: torch.device
) -> None:
    call = sound_call(operator, device)
    call[name][1] = call[name][1].neg()
    expected = copy_of(call)
    memory = -call[name][1]
    before = memory.clone()
    call[name][1] = torch._neg_view(memory)
    if name in operator.written:
        with pytest.raises(RuntimeError, match="mutable TensorLists with negation"):
            operator(call)
        assert_same_bits(memory, before)
        return
    operator(call)
    operator(expected)
    for each in operator.written:
        for ours, wanted in zip(tensors_of(call[each]), tensors_of(expected[each]), strict=True):
            assert_same_bits(ours, wanted)


# --- Autograd.


def the_leaf(leaf: Tensor) -> Tensor:
    return leaf


def a_view_of_it(leaf: Tensor) -> Tensor:
    return leaf.view(leaf.shape)


def computed_from_it(leaf: Tensor) -> Tensor:
    return leaf.clone()


GRAPH_KINDS = [the_leaf, a_view_of_it, computed_from_it]


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("unscale_", "dst"),
        ("axpby_", "out"),
    ],
)
def test_a_tensor_that_requires_grad_is_refused_in_grad_mode_only(
    operator: str, name: str, device: torch.device
) -> None:
    for kind in GRAPH_KINDS:
        call = sound_call(OPERATOR[operator], device)
        call[name][2] = kind(call[name][2].requires_grad_())
        where = re.escape(f"{operator}: {name}[2]")
        message = f"^{where} requires grad; call this operator under torch.no_grad"
        assert_refuses(OPERATOR[operator], call, message)
        with torch.no_grad():
            OPERATOR[operator](call)


@pytest.mark.cpu_only
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_device_without_kernels_is_named(operator: Operator) -> None:
    call = sound_call(operator, torch.device("cpu"))
    before = copy_of(call)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XPU)
    packet = getattr(torch.ops.apex_mp, operator.name)
    message = (
        f"^{operator.name}: an argument is a XPU tensor, for which this build of apex_mp has no"
    )
    with pytest.raises(RuntimeError, match=message):
        packet.default.redispatch(keys, *call.values())
    for name, value in call.items():
        for tensor, old in zip(tensors_of(value), tensors_of(before[name]), strict=True):
            assert_same_bits(tensor, old)

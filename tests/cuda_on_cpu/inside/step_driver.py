"""The fused step of csrc/cuda/step/step.h on CPU tensors, by way of shim/step_driver.cpp."""

from __future__ import annotations

import ctypes
import dataclasses
from ctypes import byref, c_bool, c_char_p, c_double, c_int64, c_void_p
from typing import ClassVar

import torch
from on_cuda_kernels import LIBRARY
from step_structs import (
    GROUP_OUTCOME,
    MAX_NUMBERS,
    MAX_OPTIONS,
    MAX_TENSORS,
    OUTCOME,
    SIZES,
    CArray,
    CGroup,
    CLossScaleRule,
    CNumber,
    CRow,
    CRun,
    CTask,
)
from torch import Tensor

from apex_mp.scale.device_scale import DeviceScale

NOT_TO_BE_READ = -1e300  # the host's value where the kernel is to read its own
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]  # as enum DType


_library = ctypes.CDLL(LIBRARY)
for _name in ("step_new", "step_refresh_groups", "step_run"):
    getattr(_library, _name).restype = c_char_p
for _name in ("step_bytes", "step_outcome_offset", "step_outcome_bytes"):
    getattr(_library, _name).restype = c_int64
for _name in ("step_fits", "step_knows_groups"):
    getattr(_library, _name).restype = c_bool

_sizes = (c_int64 * len(SIZES))()
_library.step_sizes(_sizes)
assert list(_sizes) == SIZES, f"C++ has other sizes: {list(_sizes)}, not {SIZES}"


@dataclasses.dataclass
class Row:
    """One parameter; without a gradient it is not stepped.

    Attributes:
        tensors: Of state, laid out like the parameter.
        numbers: Of state; None: it is not there.
    """

    param: Tensor
    grad: Tensor | None
    copy: Tensor | None
    tensors: list[Tensor]
    numbers: list[Tensor | None]
    group: int = 0
    scaled: bool = True
    writes_grad: bool = False
    copy_counts: bool = False
    position: int = 0


@dataclasses.dataclass
class Group:
    """The options of one parameter group; a tensor is read by the kernel."""

    lr: float | Tensor = 0.01
    max_norm: float = 0.0
    maximize: bool = False
    stochastic_rounding: bool = False
    norm: float | Tensor | None = None

    OPTIONS: ClassVar[tuple[str, ...]] = ()  # of the rule, in its order


@dataclasses.dataclass
class Adam(Group):
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3
    weight_decay: float = 0.1
    adam_w_mode: bool = True
    bias_correction: bool = True
    eps_inside_sqrt: bool = False

    OPTIONS = (
        *("beta1", "beta2", "eps", "weight_decay"),
        *("adam_w_mode", "bias_correction", "eps_inside_sqrt"),
    )


@dataclasses.dataclass
class Sgd(Group):
    momentum: float = 0.9
    dampening: float = 0.2
    weight_decay: float = 0.1
    nesterov: bool = False
    wd_after_momentum: bool = False

    OPTIONS = ("momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum")


RULES: list[type[Group]] = [Adam, Sgd]  # as math::AllRules begins


@dataclasses.dataclass
class Task:
    """One step."""

    rows: list[Row]
    groups: list[Group]
    scale: float | Tensor = 1.0
    clip_by_global_norm: bool = False
    check: bool = False
    found_inf: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class GroupOutcome:
    norm: float
    scaled_factor: float
    plain_factor: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the step left in its memory."""

    found_inf: float
    loss_scale: tuple[float, int, int]  # scale, good steps, overflows
    scale: float
    norm: float
    nonfinite_rows: list[int]
    groups: list[GroupOutcome]


class Step:
    """A StepTable and its memory, which holds NaN wherever nothing was uploaded."""

    def __init__(self, task: Task) -> None:
        self._table = ctypes.c_void_p()
        _raise(_library.step_new(byref(_task(task)), byref(self._table)))
        self.memory = torch.full((_library.step_bytes(self._table),), 255, dtype=torch.uint8)
        self.upload()

    def __del__(self) -> None:
        _library.step_delete(self._table)

    def upload(self) -> None:
        _library.step_upload(self._table, self._address)

    def fits(self, task: Task) -> bool:
        return bool(_library.step_fits(self._table, byref(_task(task))))

    def knows_groups(self, task: Task) -> bool:
        return bool(_library.step_knows_groups(self._table, byref(_task(task))))

    def refresh_groups(self, task: Task) -> None:
        task_ = byref(_task(task))
        _raise(_library.step_refresh_groups(self._table, task_, self._address))

    def run(
        self,
        task: Task,
        *,
        loss_scale: DeviceScale | None = None,
        norms: bool = False,
        captured: bool = False,
    ) -> Outcome:
        run = CRun(self._address, norms=norms, captured=captured)
        if loss_scale is not None:
            run.state = loss_scale.state.data_ptr()
            run.rule = CLossScaleRule(**loss_scale.rule._asdict())
        _raise(_library.step_run(self._table, byref(_task(task)), byref(run)))
        return self.outcome

    @property
    def outcome(self) -> Outcome:
        offset = _library.step_outcome_offset(self._table)
        size = _library.step_outcome_bytes(self._table)
        assert offset + size == len(self.memory)
        raw = bytes(self.memory[offset:].tolist())
        found_inf, new_scale, good, overflows, scale, norm, *rows = OUTCOME.unpack(
            raw[: OUTCOME.size]
        )
        named = rows.index(-1) if -1 in rows else len(rows)
        assert rows[named:] == [-1] * (len(rows) - named)
        groups = [GroupOutcome(*each) for each in GROUP_OUTCOME.iter_unpack(raw[OUTCOME.size :])]
        return Outcome(found_inf, (new_scale, good, overflows), scale, norm, rows[:named], groups)

    @property
    def _address(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.memory.data_ptr())


def _raise(message: bytes | None) -> None:
    if message is not None:
        raise RuntimeError(message.decode())


def _array(tensor: Tensor | None) -> CArray:
    if tensor is None:
        return CArray(None, 0)
    # An empty tensor has no memory; it is there all the same.
    return CArray(tensor.data_ptr() or 16, DTYPES.index(tensor.dtype))


def _number(value: float | Tensor) -> CNumber:
    if isinstance(value, Tensor):
        return CNumber(value.data_ptr(), value.dtype == torch.float64, NOT_TO_BE_READ)
    return CNumber(None, False, value)


def _row(row: Row) -> CRow:
    state = [*row.tensors, *[None] * (MAX_TENSORS - len(row.tensors))]
    tensors = (CArray * MAX_TENSORS)(*map(_array, state))
    addresses = [None if number is None else number.data_ptr() for number in row.numbers]
    numbers = (c_void_p * MAX_NUMBERS)(*addresses)
    exponents = (c_void_p * MAX_TENSORS)()
    arrays = [_array(tensor) for tensor in (row.param, row.grad, row.copy)]
    facts = (row.param.numel(), row.group, row.position, row.scaled)
    return CRow(*arrays, tensors, exponents, numbers, *facts, row.writes_grad, row.copy_counts)


def _group(group: Group) -> CGroup:
    options = (c_double * MAX_OPTIONS)(*(float(getattr(group, name)) for name in group.OPTIONS))
    norm = 0.0 if group.norm is None else group.norm
    return CGroup(
        options,
        _number(group.lr),
        group.max_norm,
        group.maximize,
        group.stochastic_rounding,
        group.norm is not None,
        _number(norm),
    )


def _task(task: Task) -> CTask:
    rows = (CRow * len(task.rows))(*map(_row, task.rows))
    groups = (CGroup * len(task.groups))(*map(_group, task.groups))
    found_inf = None if task.found_inf is None else task.found_inf.data_ptr()
    rule = RULES.index(type(task.groups[0])) if task.groups else 0
    result = CTask(rule, rows, len(rows), groups, len(groups), _number(task.scale))
    result.clip_by_global_norm, result.check = task.clip_by_global_norm, task.check
    result.found_inf = found_inf
    result.kept = (rows, groups)  # As long as pointers to them are used.
    return result

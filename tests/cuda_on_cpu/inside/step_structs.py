"""The structs of the fused step as C++ lays them out, for ctypes."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, Structure, c_bool, c_double, c_int, c_int64

MAX_TENSORS, MAX_NUMBERS, MAX_OPTIONS = 2, 2, 9  # csrc/math/rules.h


class CArray(Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", c_int)]


class CRow(Structure):
    _fields_ = [
        *[(name, CArray) for name in ("param", "grad", "copy")],
        ("tensors", CArray * MAX_TENSORS),
        ("exponents", ctypes.c_void_p * MAX_TENSORS),
        ("numbers", ctypes.c_void_p * MAX_NUMBERS),
        ("size", c_int64),
        ("group", c_int),
        ("position", c_int),
        ("scaled", c_bool),
        ("writes_grad", c_bool),
        ("copy_counts", c_bool),
    ]


class CNumber(Structure):
    _fields_ = [("pointer", ctypes.c_void_p), ("is_double", c_bool), ("value", c_double)]


class CGroup(Structure):
    _fields_ = [
        ("options", c_double * MAX_OPTIONS),
        ("lr", CNumber),
        ("max_norm", c_double),
        ("maximize", c_bool),
        ("stochastic_rounding", c_bool),
        ("has_norm", c_bool),
        ("norm", CNumber),
    ]


class CTask(Structure):
    _fields_ = [
        ("rule", c_int),
        ("rows", POINTER(CRow)),
        ("row_count", c_int64),
        ("groups", POINTER(CGroup)),
        ("group_count", c_int64),
        ("scale", CNumber),
        ("clip_by_global_norm", c_bool),
        ("check", c_bool),
        ("found_inf", ctypes.c_void_p),
    ]


class CLossScaleRule(Structure):
    _fields_ = [
        *[(name, c_double) for name in ("growth_factor", "backoff_factor")],
        *[(name, c_double) for name in ("min_scale", "max_scale")],
        *[(name, c_int) for name in ("growth_interval", "hysteresis")],
    ]


class CRun(Structure):
    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("rule", CLossScaleRule),
        ("norms", c_bool),
        ("captured", c_bool),
        ("passes", c_int),
    ]


ROWS_NAMED = 8
OUTCOME = struct.Struct(f"ffiidd{ROWS_NAMED}i")
GROUP_OUTCOME = struct.Struct("ddd")
SIZES = [ctypes.sizeof(each) for each in (CRow, CGroup, CTask, CRun)] + [OUTCOME.size]

"""A pytest plugin: apex_mp's operators on CPU tensors are its CUDA kernels, run on the host.

It stands in for the module apex_mp._C before anybody imports apex_mp. Environment variables, set by
nets.py: CUDA_ON_CPU_LIBRARY, what builder.py made; CUDA_ON_CPU_ORDER, one of ORDERS.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from types import ModuleType

import pytest
import torch

LIBRARY = os.environ["CUDA_ON_CPU_LIBRARY"]
ORDERS = ["forward", "backward", "shuffled"]  # as enum Order of shim/execution.h
ORDER = os.environ["CUDA_ON_CPU_ORDER"]

torch.ops.load_library(LIBRARY)
SHIM = ctypes.CDLL(LIBRARY)
_choose = SHIM.cuda_on_cpu_choose
_choose.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_bool]


def choose(*, order: str = ORDER, blocks_at_ends: int = 0, numbers_on_host: bool = False) -> None:
    """Set what execution.h calls Settings; each test begins with the defaults."""
    _choose(ORDERS.index(order), blocks_at_ends, numbers_on_host)


SHIM.cuda_on_cpu_all_blocks.restype = ctypes.c_int64


def all_blocks() -> int:
    """Return how many blocks kernels have had since the last `choose`."""
    return int(SHIM.cuda_on_cpu_all_blocks())


choose()


class _Extension(ModuleType):
    """What tests and loader ask of apex_mp._C."""

    torch_version = str(torch.__version__)
    with_cuda = True
    # Imported by name, and used by optimizers alone, which run where the library has the plan.
    StepOutcome = DeviceLossScale = type("", (), {})

    @staticmethod
    def cpu_level() -> str:
        return "cuda on cpu"

    @staticmethod
    def cpu_levels() -> list[str]:
        return ["cuda on cpu"]

    @staticmethod
    def set_cpu_level(level: str) -> None:
        assert level == "cuda on cpu"


def _load_plan() -> ModuleType:
    loader = ExtensionFileLoader("_plan_on_kernels", LIBRARY)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


extension = _Extension("apex_mp._C")
if hasattr(SHIM, "PyInit__plan_on_kernels"):
    plan = _load_plan()
    for name in dir(plan):
        if not name.startswith("_"):
            setattr(extension, name, getattr(plan, name))
sys.modules["apex_mp._C"] = extension


@pytest.fixture(autouse=True)
def _host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device is one that FP16_Optimizer leaves alone; nothing arrives before the host waits."""
    from apex_mp.core import readback
    from apex_mp.scale import device_scale

    monkeypatch.setattr(device_scale, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(readback, "is_capturing", lambda: bool(SHIM.cuda_on_cpu_is_capturing()))
    monkeypatch.setattr(readback.Readback, "has_arrived", lambda self: False)
    yield
    readback._pending.clear()


@pytest.fixture(autouse=True)
def _ordinary_settings() -> None:
    choose()
    SHIM.cuda_on_cpu_capture(False)
    SHIM.cuda_on_cpu_use_stream(0)
    SHIM.cuda_on_cpu_wait_for_all()

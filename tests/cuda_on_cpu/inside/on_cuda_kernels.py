"""A pytest plugin: apex_mp's operators on CPU tensors are its CUDA kernels, run on the host.

It stands in for the module apex_mp._C before anybody imports apex_mp. Environment variables, set by
nets.py: CUDA_ON_CPU_LIBRARY, what builder.py made; CUDA_ON_CPU_ORDER, one of ORDERS.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType

import pytest
import torch

LIBRARY = os.environ["CUDA_ON_CPU_LIBRARY"]
ORDERS = ["forward", "backward", "shuffled"]  # as enum Order of shim/execution.h
ORDER = os.environ["CUDA_ON_CPU_ORDER"]

torch.ops.load_library(LIBRARY)
_choose = ctypes.CDLL(LIBRARY).cuda_on_cpu_choose
_choose.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_bool]


def choose(*, order: str = ORDER, blocks_at_ends: int = 0, numbers_on_host: bool = False) -> None:
    """Set what execution.h calls Settings; each test begins with the defaults."""
    _choose(ORDERS.index(order), blocks_at_ends, numbers_on_host)


choose()


class _Extension(ModuleType):
    """What tests and loader ask of apex_mp._C."""

    torch_version = str(torch.__version__)
    with_cuda = True

    @staticmethod
    def cpu_level() -> str:
        return "cuda on cpu"

    @staticmethod
    def cpu_levels() -> list[str]:
        return ["cuda on cpu"]

    @staticmethod
    def set_cpu_level(level: str) -> None:
        assert level == "cuda on cpu"


sys.modules["apex_mp._C"] = _Extension("apex_mp._C")


@pytest.fixture(autouse=True)
def _ordinary_settings() -> None:
    choose()

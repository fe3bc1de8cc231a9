# The compiled module: facts of the build (csrc/module.cpp), objects of the step (csrc/step/).

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

with_cuda: bool
cuda_version: str | None
cuda_archs: str
torch_version: str
compiler: str
debug: bool

def cpu_level() -> str: ...
def cpu_levels() -> list[str]: ...
def set_cpu_level(level: str) -> None: ...
def read_grads(params: list[Any]) -> tuple[dict[torch.device, DeviceGrads], list[int], bool]: ...
def join_master(weight: Tensor, remainder: Tensor, master: Tensor) -> None: ...
def split_master(master: Tensor, weight: Tensor, remainder: Tensor) -> None: ...
def same_items(one: list[Any], other: list[Any]) -> bool: ...

class StepOutcome:
    @property
    def is_known(self) -> bool: ...
    @property
    def found_inf(self) -> bool: ...
    @property
    def norms(self) -> list[float]: ...
    @property
    def nonfinite_rows(self) -> list[int]: ...

class DeviceLossScale:
    def __init__(
        self,
        scale: Tensor,
        good_steps: Tensor,
        overflows: Tensor,
        *,
        growth_factor: float,
        backoff_factor: float,
        min_scale: float,
        max_scale: float,
        growth_interval: int,
        hysteresis: int,
    ) -> None: ...

class StepPlan:
    def __init__(
        self,
        rule: str,
        caller: str,
        *,
        tensors: Sequence[str],
        numbers: Sequence[str],
        once: bool = False,
    ) -> None: ...
    def read(
        self,
        param_groups: list[dict[str, Any]],
        state: dict[Any, Any],
        make_state: Callable[[int, int], dict[str, Any]],
        *,
        grads: list[list[Tensor | None]] | None,
        grads_of: list[list[Tensor | None]] | None,
        copies: list[list[Tensor | None]] | None,
        scale: float | Tensor,
        unscale: Sequence[torch.dtype] = (),
    ) -> None: ...
    def run(
        self,
        *,
        norms: list[float | Tensor | None] | None,
        found_inf: Tensor | None,
        check: bool,
        clip_by_global_norm: bool,
        loss_scale: DeviceLossScale | None,
        wait: bool,
    ) -> StepOutcome: ...
    def clear(self) -> None: ...
    @property
    def gradients(self) -> list[tuple[Tensor, int, bool]]: ...
    @property
    def outcome(self) -> Tensor: ...
    @staticmethod
    def read_outcome(outcome: Tensor) -> StepOutcome: ...
    @property
    def without_grad(self) -> list[tuple[int, int]]: ...
    @property
    def written(self) -> list[tuple[int, int, bool]]: ...
    @property
    def can_run(self) -> bool: ...
    @property
    def has_parts(self) -> bool: ...
    def refresh_groups(self) -> None: ...

class DeviceGrads:
    def __init__(self, device: torch.device) -> None: ...
    def insert(self, row: int, grad: Tensor) -> None: ...
    def check(self, found_inf: Tensor, sum_sq: Tensor) -> None: ...
    def __len__(self) -> int: ...
    @property
    def has_double(self) -> bool: ...
    @property
    def has_16_bit(self) -> bool: ...
    @property
    def rows(self) -> list[int]: ...
    @property
    def grads(self) -> list[Tensor]: ...

class GradVersions:
    def record(self, params: list[Any]) -> None: ...
    def changed(self, params: list[Any]) -> bool: ...

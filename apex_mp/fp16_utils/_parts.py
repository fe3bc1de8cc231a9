"""The lowest layer of FP16_Optimizer: its attributes, and methods that higher layers override."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from apex_mp.core.log import logger
from apex_mp.core.masters.master_grads import MasterGrads
from apex_mp.core.masters.masters import GroupedMasters
from apex_mp.core.masters.weight_watch import WeightWatch
from apex_mp.core.step.inner import StepWatch
from apex_mp.core.step.record import StepRecord
from apex_mp.core.step.scaled_step import StepResult
from apex_mp.core.step.skips import ParamNames
from apex_mp.fp16_utils._delegates import Delegates
from apex_mp.fp16_utils._misuse import Misuse
from apex_mp.fp16_utils._scale_on_device import ScaleOnDevice
from apex_mp.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler

LOG = logger("apex_mp.fp16_utils")
# Dynamo cannot trace these methods; torch's own optimizers use this decorator too.
eager = torch._disable_dynamo  # type: ignore[attr-defined]


class Parts(Delegates):
    """The base of OldNames, Outcomes, Stepping, Checkpoints and FP16_Optimizer, in this order.

    Attributes:
        optimizer: The inner optimizer.
        verbose: Whether messages are logged.
        clip: "group" or "global".
        first_closure_call_this_step: As apex had it.
    """

    _DYNAMIC_DEFAULTS: Mapping[str, Any] = {}

    verbose: bool
    clip: str
    first_closure_call_this_step: bool
    _legacy_arguments: tuple[str, ...]  # that the inner optimizer's step takes
    _loss_scaler: LossScaler | DynamicLossScaler
    _dynamic_args: dict[str, Any]
    _device_scale: ScaleOnDevice
    _grads: MasterGrads
    _masters: GroupedMasters
    _names: ParamNames
    _misuse: Misuse
    _watch: StepWatch
    _weights: WeightWatch
    _record: StepRecord
    _overflow: bool | None  # None: unknown since the last backward
    _awaited: StepResult | None  # the last step, until its outcome is known
    _group_norms: list[float]  # of the last step's unscaled gradients, if measured
    _iteration: int
    _optimizer_step_pre_hooks: OrderedDict[int, Any]
    _optimizer_step_post_hooks: OrderedDict[int, Any]

    def update_master_grads(self) -> None:
        """Unscale the accumulated gradients; FP16_Optimizer implements it."""
        raise NotImplementedError

"""Automatic mixed precision: casts for a whole process, and scaled losses."""

from apex_mp.amp import scaler as scaler
from apex_mp.amp._amp_state import _amp_state, master_params
from apex_mp.amp._scale_loss.step_guard import step_was_skipped
from apex_mp.amp.amp import init
from apex_mp.amp.casts.compute import fp16_compute
from apex_mp.amp.casts.registry import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from apex_mp.amp.frontend import (
    clear_cache,
    disable_casts,
    initialize,
    load_state_dict,
    scale_loss,
    state_dict,
)
from apex_mp.amp.grad_scaler import GradScaler
from apex_mp.amp.handle import AmpHandle, NoOpHandle
from apex_mp.amp.opt import OptimWrapper

__all__ = [
    "AmpHandle",
    "GradScaler",
    "NoOpHandle",
    "OptimWrapper",
    "_amp_state",
    "clear_cache",
    "disable_casts",
    "float_function",
    "fp16_compute",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
    "step_was_skipped",
]

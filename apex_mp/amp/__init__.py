"""Automatic mixed precision: casts for a whole process, and scaled losses."""

from apex_mp.amp.amp import init
from apex_mp.amp.handle import AmpHandle, NoOpHandle
from apex_mp.amp.opt import OptimWrapper
from apex_mp.amp.registry import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = [
    "AmpHandle",
    "NoOpHandle",
    "OptimWrapper",
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

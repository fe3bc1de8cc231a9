"""Training on 16-bit weights with float32 masters, and the API of NVIDIA's apex (2018-2019).

    optimizer = apex_mp.optimizers.FusedAdamW(model.parameters(), master_weights=True)
    scaler = apex_mp.amp.GradScaler(device, model=model)

`apex_mp.accelerate`, `lightning` and `pytorch_lightning` are imported when they are first used.
"""

import importlib
from typing import Any

from apex_mp._version import __version__
from apex_mp.core import extension

try:
    extension.load()
except ImportError:
    if not extension.is_environment_report():
        raise
else:
    from apex_mp import (
        RNN,
        amp,
        convert,
        fp16_utils,
        loss_scale_manager,
        monitor,
        multi_tensor_apply,
        normalization,
        optimizers,
        parallel,
        reparameterization,
    )
    from apex_mp._as_apex.install import install_as_apex, uninstall_as_apex
    from apex_mp._run.master_weights import use_master_weights
    from apex_mp.averaged_masters import AveragedMasters
    from apex_mp.checkpoint import load_checkpoint, save_checkpoint
    from apex_mp.masters.cast_parameters import cast_parameters
    from apex_mp.masters.float32_parts import keep_fp32

__all__ = [
    "RNN",
    "AveragedMasters",
    "__version__",
    "amp",
    "cast_parameters",
    "convert",
    "fp16_utils",
    "install_as_apex",
    "keep_fp32",
    "load_checkpoint",
    "loss_scale_manager",
    "monitor",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "reparameterization",
    "save_checkpoint",
    "uninstall_as_apex",
    "use_master_weights",
]


_ON_FIRST_USE = ("accelerate", "lightning", "pytorch_lightning")


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"apex_mp.{name}")
    raise AttributeError(f"module 'apex_mp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__  # Without what needs a trainer: inspect reads all that is listed here.

"""Functions for all trainers: the error if one is missing, and how gradients are treated."""

from __future__ import annotations

from typing import Any

import torch

from apex_mp.core.tensors import params_of


def missing_package(module: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the import error of a module of this package whose trainer is not installed.

    Args:
        module: `apex_mp.` and the name under which the trainer is imported.
        error: What the import of the trainer raised.
    """
    package = module.removeprefix("apex_mp.").replace("_", "-")
    lacking = str(error.name).partition(".")[0]
    return ModuleNotFoundError(
        f"{module} needs {lacking}, which is not installed: pip install {package}", name=lacking
    )


def has_half_grads(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether gradients should stay scaled until the step, because they are float16.

    If they were unscaled in place, gradients below 2**-25 would become 0.
    """
    return any(grad.dtype == torch.float16 for grad in grads_of(optimizer).values())


def grads_of(optimizer: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Return the existing gradients of an optimizer's parameters."""
    params = params_of(optimizer)
    return {param: param.grad for param in params if param.grad is not None}

"""The state of `amp.initialize` in this process, and how much amp prints."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp.handle import AmpHandle, NoOpHandle
from apex_mp.amp.levels.options import Options
from apex_mp.core.log import logger
from apex_mp.loss_scale import AMP_PRESET
from apex_mp.scale.amp_scaler import LossScaler

LOG = logger("apex_mp.amp")


class AmpState:
    """The one state of the process.

    Attributes:
        opt_properties: The options, once `initialize` was called.
        loss_scalers: One for each loss.
        handle: The handle whose casts O1 switched on.
        min_loss_scale: Given to `initialize`.
        max_loss_scale: Likewise.
        models: References to the models that went through `initialize`.
        verbosity: 0 prints nothing, 1 what is set up and skipped steps, 2 casts too.
        hard_override: Print what would be an error about dtypes, and go on.
        allow_incoming_model_not_fp32: Accept models that are in low precision already.
    """

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.opt_properties: Options | None = None
        self.loss_scalers: list[LossScaler] = []
        self.handle: AmpHandle | NoOpHandle | None = None
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float = AMP_PRESET.max_scale
        self.models: list[weakref.ref[torch.nn.Module]] = []

    @contextlib.contextmanager
    def printing(self, verbosity: int) -> Iterator[None]:
        """Print as much from now on, unless the `with` block raises."""
        before, self.verbosity = self.verbosity, verbosity
        try:
            yield
        except BaseException:
            self.verbosity = before
            raise

    def parameter_names(self) -> dict[int, str]:
        """Return names of the parameters of all models, by id()."""
        models = [model for reference in self.models if (model := reference()) is not None]
        return {
            id(param): f"model {number}: {name}" if len(models) > 1 else name
            for number, model in enumerate(models)
            for name, param in model.named_parameters()
        }


_amp_state = AmpState()


def maybe_print(message: str) -> None:
    """Log a message unless verbosity is 0; the first process of a group prints it."""
    if _amp_state.verbosity > 0:
        LOG.info("%s", message)


def warn_or_err(message: str) -> None:
    """Raise a RuntimeError, or print it if `_amp_state.hard_override` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    maybe_print(f"Warning:  {message}")


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield what an optimizer steps: float32 masters where there are any, else the parameters.

    Their gradients are unscaled when a `scale_loss` block has ended, so that they can be clipped:

        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)

    Args:
        optimizer: Any optimizer, one that `initialize` returned or an FP16_Optimizer.
    """
    for group in optimizer.param_groups:
        yield from group["params"]

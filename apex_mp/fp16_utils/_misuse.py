"""Checks of what FP16_Optimizer is given, and warnings of what would train with wrong gradients."""

from __future__ import annotations

import inspect
import math
import weakref
from typing import Any, ClassVar

from torch import Tensor

from apex_mp import _C
from apex_mp.core import readback
from apex_mp.core.log import warn
from apex_mp.grads.edits import Edits
from apex_mp.masters.master_grads import MasterGrads, Stage
from apex_mp.masters.masters import LOW_PRECISION
from apex_mp.masters.steps_of_masters import check_lists

_STEPS_OF_ZEROS = 4  # before a warning
_LEAST = 64.0  # What a clip makes gradients smaller by, and the loss scale, to be worth a warning.


class Misuse:
    """Warns, once each, of gradients that an FP16_Optimizer should not get.

    Args:
        grads: The optimizer's gradients.
    """

    # Optimizers whose users may not know of the loss scale.
    _unsure: ClassVar[weakref.WeakSet[Misuse]] = weakref.WeakSet()

    def __init__(self, grads: MasterGrads) -> None:
        self._grads = grads
        self._unsure.add(self)
        self._after_backward = _C.GradVersions()
        self._norm_after_backward = 0.0
        self._may_be_clipped = True  # until the first step whose gradients are finite
        self._steps_of_zeros = 0
        self._edits_were_lost = False

    def note_scale_is_known(self) -> None:
        """Assume that any backward scales its loss, because the user has read the loss scale."""
        self._unsure.discard(self)

    def note_backward(self) -> None:
        """Note a backward of a scaled loss; it may give gradients to other optimizers too."""
        self.note_scale_is_known()
        if self._may_be_clipped and not readback.is_capturing():
            self._after_backward.record(self._grads.masters.model_params())
            self._norm_after_backward = self._grads.model_norm()
        for other in [*self._unsure]:
            if other._grads.has_new_grads():
                other.note_scale_is_known()

    def check_source(self, scale: float) -> None:
        """Warn, before gradients are unscaled, if their loss was not scaled."""
        if scale == 1.0 or self not in self._unsure or not self._grads.any_nonzero():
            return
        self.note_scale_is_known()
        warn(
            "FP16_Optimizer: the gradients do not come from optimizer.backward(loss), and "
            "optimizer.loss_scale was never read, but they are divided by the loss scale, "
            f"{scale}. Call optimizer.backward(loss) instead of loss.backward(); or, if the script "
            "scales the loss itself, multiply it by optimizer.loss_scale",
            "gradients-that-were-not-scaled",
        )

    def edits_count(self) -> bool:
        """Return whether to make masters' gradients again because the model's were edited."""
        edits = self._grads.model_edits()
        if edits is Edits.OF_BOTH and not self._edits_were_lost:
            self._edits_were_lost = True
            warn(
                "FP16_Optimizer: the model's gradients and those of the masters, in "
                "optimizer.param_groups, were both edited after backward; the step uses the "
                "masters'. Call optimizer.update_master_grads() after edits of the model's",
                "gradients-edited-twice",
            )
        return edits is Edits.OF_MODEL

    def refuse_used(self) -> None:
        """Raise a RuntimeError if fp32 parameters have no gradients but those of the last step."""
        grads = self._grads
        if readback.is_capturing():  # The graph holds the step; backward may come before a replay.
            return
        is_used = grads.stage is Stage.STEPPED and not (grads.has_new_grads() or grads.is_in_graph)
        if is_used and any(param.grad is not None for param in grads.masters.fp32_params()):
            raise RuntimeError(
                "FP16_Optimizer.step: no gradients have come since the last step, which has left "
                "those of float32 parameters unscaled. If a CUDA graph with the backward was "
                "replayed, these are scaled, which nothing shows: capture optimizer.backward(loss),"
                " which unscales them in the graph. To step twice with the same gradients, call "
                "optimizer.backward twice"
            )

    def check_clip(self) -> None:
        """Warn, before the first finite step, if the model's scaled gradients were clipped.

        They were if an edit after backward divided them by as much as a loss scale. Scales below 64
        are ignored, because they do little harm.
        """
        if not self._may_be_clipped or readback.is_capturing():
            return
        params = self._grads.masters.model_params()
        if all(param.grad is None for param in params):
            return
        self._may_be_clipped = self._after_backward.changed(params)
        if not self._may_be_clipped:
            return
        norm, before = self._grads.model_norm(), self._norm_after_backward
        if not math.isfinite(norm):
            return  # An overflow, which the step reports.
        if norm == 0.0 and self._steps_of_zeros < _STEPS_OF_ZEROS:
            self._steps_of_zeros += 1
            return  # A mask, or a clip by a norm that float16 cannot hold.
        self._may_be_clipped = False
        scale = float(self._grads.scale_of_grads())
        if scale >= _LEAST and before >= _LEAST * norm and before > 0.0:
            warn(
                "FP16_Optimizer: the model's gradients were edited after backward, which has taken "
                f"their norm from {before:.3g} to {norm:.3g}. They are scaled by the loss scale, "
                f"{scale}, so if that was clip_grad_norm_(model.parameters(), max_norm), it clips "
                f"to {norm / scale:.3g}. Clip with optimizer.clip_master_grads(max_norm), or give "
                "max_grad_norm= to a fused optimizer",
                "clipping-scaled-gradients",
            )


def inner_of(init_optimizer: Any, optimizer: Any, wrapper: type) -> Any:
    """Return the optimizer to wrap, given by one of two names."""
    if (init_optimizer is None) == (optimizer is None):
        raise TypeError("FP16_Optimizer: give the optimizer to wrap once, as init_optimizer=")
    inner = init_optimizer if init_optimizer is not None else optimizer
    if isinstance(inner, wrapper):
        raise TypeError("FP16_Optimizer: init_optimizer is an FP16_Optimizer; wrap the inner one")
    # Old code has optimizers of its own that do not derive from torch's.
    if not (hasattr(inner, "param_groups") and callable(getattr(inner, "step", None))):
        raise TypeError(
            f"FP16_Optimizer: init_optimizer is a {type(inner).__name__}; it must be an optimizer"
        )
    check_lists("FP16_Optimizer", inner, LOW_PRECISION)
    return inner


def legacy_arguments(optimizer: Any) -> tuple[str, ...]:
    """Return which arguments of apex's legacy call the optimizer's step takes; may be none."""
    parameters = inspect.signature(optimizer.step).parameters
    if not {"grads", "output_params", "scale"} <= set(parameters):
        return ()
    return tuple(
        name for name in ("grads", "output_params", "scale", "grad_norms") if name in parameters
    )


def check_loss(loss: Any) -> None:
    """Refuse a loss that has no backward."""
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        kind = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"FP16_Optimizer.backward: loss is a {kind}; it must be a floating tensor")

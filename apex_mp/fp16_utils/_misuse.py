"""Wrong uses of FP16_Optimizer that would train with wrong gradients: one warning for each."""

from __future__ import annotations

import math
import weakref
from typing import ClassVar

from apex_mp import _C
from apex_mp.core import device_scale
from apex_mp.core.grads import Edits
from apex_mp.core.log import warn
from apex_mp.core.master_grads import MasterGrads

_STEPS_OF_ZEROS = 4  # before a warning


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
        self._after_backward = _C.GradMarks()
        self._may_be_clipped = True  # until the first step whose gradients are finite
        self._steps_of_zeros = 0
        self._edits_were_lost = False

    def note_scale_is_known(self) -> None:
        """Take gradients of another backward for scaled ones: the user has read the loss scale."""
        self._unsure.discard(self)

    def note_backward(self) -> None:
        """Note a backward of a scaled loss; it may produce gradients for other optimizers too."""
        self.note_scale_is_known()
        if self._may_be_clipped:
            self._after_backward.take(self._grads.masters.model_params())
        for other in [*self._unsure]:
            if other._grads.came_in():
                other.note_scale_is_known()

    def check_source(self, scale: float) -> None:
        """Warn, before gradients are unscaled, if their loss cannot have been scaled.

        Args:
            scale: The loss scale.
        """
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
        """Tell whether to make masters' gradients again because the model's were edited."""
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

    def check_clip(self) -> None:
        """Warn, before the first finite step, if the model's scaled gradients were clipped.

        Clipping leaves the norm `max_norm`, which is a short number such as 1.0 or 0.25; a clip
        that respects the loss scale leaves that number times the scale; other edits leave any norm.
        This is a guess, so it only warns. Scales below 64 are ignored: they do little harm.
        """
        if not self._may_be_clipped or device_scale.is_capturing():
            return
        params = self._grads.masters.model_params()
        if all(param.grad is None for param in params):
            return
        self._may_be_clipped = self._after_backward.differ(params)
        if not self._may_be_clipped:
            return
        norm = self._grads.norm_as_they_lie()
        if not math.isfinite(norm):
            return  # An overflow, which the step reports.
        if norm == 0.0 and self._steps_of_zeros < _STEPS_OF_ZEROS:
            self._steps_of_zeros += 1
            return  # A mask, or a clip by a norm that float16 cannot hold.
        self._may_be_clipped = False
        scale = float(self._grads.scale_of_grads())
        result = ""
        if 0.01 < norm < 101.0 and _is_short(norm) and not _is_short(norm / scale):
            result = f"have the norm {norm:.3g}"
        elif norm == 0.0:
            result = "are all zero again, maybe as float16 cannot hold their norm"
        if scale >= 64.0 and result:
            max_norm = f"{norm:.3g}" if norm else "max_norm"
            warn(
                "FP16_Optimizer: the model's gradients were edited after backward and now "
                f"{result}, as clip_grad_norm_(model.parameters(), {max_norm}) leaves them. They "
                f"are scaled by the loss scale, {scale}, so this clips to {norm / scale:.3g}. Clip "
                "with optimizer.clip_master_grads(max_norm), or give max_grad_norm= to a fused "
                "optimizer",
                "clipping-scaled-gradients",
            )


def _is_short(number: float) -> bool:
    """Whether a number is one digit, or two of which the second is 5, times a power of ten."""
    digits = number / 10.0 ** math.floor(math.log10(number)) if number > 0.0 else 0.0
    return math.isclose(round(2.0 * digits) / 2.0, digits, rel_tol=2e-3)  # of bfloat16

"""FP16_Optimizer with the defaults of apex.optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apex_mp import fp16_utils
from apex_mp.loss_scale import FUSED_PRESET
from apex_mp.masters.masters import MasterGroup
from apex_mp.saved.dcp import with_checkpoint_view


class FP16_Optimizer(fp16_utils.FP16_Optimizer):
    """`apex_mp.fp16_utils.FP16_Optimizer` with the defaults of the fused one.

        optimizer = FP16_Optimizer(FusedAdam(model.half().parameters()), dynamic_loss_scale=True)

    The dynamic loss scale starts at 2**16, `zero_grad()` sets gradients to None, the messages are
    those of apex.optimizers, and `state_dict()` has its keys. Everything else, arguments included,
    is the same; any optimizer can be wrapped, and the fused ones gain most.
    """

    _DYNAMIC_DEFAULTS: Mapping[str, Any] = {"init_scale": FUSED_PRESET.scale}
    _ZERO_GRAD_SETS_NONE = True

    def _announce(self, index: int, group: MasterGroup) -> None:
        """Print nothing, as in apex."""

    def _skip_message(self, iteration: int, scale: float) -> str:
        kind = "dynamic" if self.dynamic_loss_scale else "static"
        return f"\nGrad overflow on iteration {iteration}\nUsing {kind} loss scale of {scale}"

    @with_checkpoint_view
    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as tensors and plain values.

        `torch.load(..., weights_only=True)` reads it. Masters are copied. Keys:
        `dynamic_loss_scale`, `cur_scale`, `cur_iter`, with a dynamic scale `last_overflow_iter`,
        `scale_factor` and `scale_window`, and `optimizer_state_dict`, `fp32_groups_flat` (masters,
        a vector a group).
        """
        return {
            **self._scale_state(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups_flat": [flat.detach().clone() for flat in self.fp32_groups_flat],
        }

    def _scale_state(self) -> dict[str, Any]:
        scaler = self._scaler_now().state_dict() if self.dynamic_loss_scale else {}
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_scale": self._scaler_now().cur_scale,
            "cur_iter": self.cur_iter,
            **scaler,
        }

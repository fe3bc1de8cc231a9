"""Save and load an FP16_Optimizer; `_checkpoint` reads the layouts of all eras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from apex_mp.core.checkpoints.checkpoint_view import CheckpointView, with_checkpoint_view
from apex_mp.core.checkpoints.state_checks import as_dict
from apex_mp.fp16_utils import _checkpoint, _inner_state
from apex_mp.fp16_utils._saved_scaler import whole_scaler
from apex_mp.fp16_utils._stepping import Stepping
from apex_mp.loss_scale import is_of_grad_scaler


class Checkpoints(Stepping):
    """The layer that saves and loads."""

    @with_checkpoint_view
    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as tensors and plain values.

        `torch.load(..., weights_only=True)` reads it. Masters are copied. Keys: `loss_scaler`,
        `dynamic_loss_scale`, `cur_iter`, `overflow`, `first_closure_call_this_step`,
        `optimizer_state_dict`, `fp32_from_fp16` (masters, a list for each group).
        """
        return {
            **self._scale_state(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": _checkpoint.masters(self._masters.groups),
        }

    def _scale_state(self) -> dict[str, Any]:
        return {
            "loss_scaler": self._scaler_now().state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_iter": self.cur_iter,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
        }

    def _checkpoint_view(self) -> CheckpointView:
        return CheckpointView(
            self.optimizer,
            self._load_view,
            self._masters.model_of,
            self._scale_state(),
            saves_masters=True,
        )

    def _load_view(
        self, inner: dict[str, Any], masters: list[list[Any]], scale: dict[str, Any]
    ) -> None:
        self.load_state_dict(
            _checkpoint.joined(inner, masters, scale, self.param_groups, self._masters.model_of)
        )

    @with_checkpoint_view
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint of any era, and write its masters to the model.

        It reads the state_dict of either FP16_Optimizer of this package; that of apex of 2018 to
        2020, whose loss scaler is an object; that of an optimizer of the same parameters that was
        not wrapped, such as torch.optim.Adam (the loss scale stays, and masters follow the model
        where it was changed); and that of a GradScaler, which sets only the loss scale.
        `docs/checkpoints.md` lists the keys.

        Raises:
            TypeError, ValueError: A key is missing, or masters, state or numbers do not fit; the
                message names group and index, and nothing is changed then.
        """
        state_dict = as_dict("FP16_Optimizer", state_dict)
        if is_of_grad_scaler(state_dict):
            self._set_scaler(whole_scaler(state_dict) or self._scaler_now())
            return
        loaded = _checkpoint.read(
            state_dict,
            self.optimizer,
            self._masters.groups,
            self._scaler_now(),
            iteration=self._iteration,
            dynamic_args=self._dynamic_args,
        )
        _inner_state.load(self.optimizer, loaded.inner)
        self._set_scaler(loaded.loss_scaler)
        self._iteration = loaded.iteration
        self.overflow = loaded.overflow
        self.first_closure_call_this_step = loaded.first_closure_call_this_step
        with torch.no_grad():
            for master, saved in loaded.masters:
                master.copy_(saved)
        self._masters.copy_to_model()
        self._weights.begin()

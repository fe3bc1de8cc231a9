"""The part of torch.optim.Optimizer that FP16_Optimizer delegates to the inner optimizer."""

from __future__ import annotations

from typing import Any

import torch

from apex_mp.parallel.checkpoint_view import with_checkpoint_view


class Delegates(torch.optim.Optimizer):
    """Properties over the inner optimizer, whose parameter groups hold the masters."""

    optimizer: Any

    @property
    @with_checkpoint_view
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, which hold masters and fp32 parameters."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    @with_checkpoint_view
    def state(self) -> Any:
        """The inner optimizer's state, by master."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        defaults: dict[str, Any] = self.optimizer.defaults
        return defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise RuntimeError(
            "FP16_Optimizer was given to a GradScaler, but scales the loss itself; use "
            "optimizer.backward(loss) and optimizer.step() without GradScaler, or GradScaler with "
            "the inner optimizer alone"
        )

    def refresh_hyperparameters(self) -> None:
        """Have the step in a captured CUDA graph use the groups' options as they are now.

        Call it between replays; see `FusedAdam.refresh_hyperparameters`.
        """
        self.optimizer.refresh_hyperparameters()

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")

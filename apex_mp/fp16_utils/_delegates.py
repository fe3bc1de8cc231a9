"""The part of torch.optim.Optimizer that FP16_Optimizer delegates to the inner optimizer."""

from __future__ import annotations

from typing import Any

from apex_mp.core.delegating import DelegatingOptimizer


class Delegates(DelegatingOptimizer):
    """Properties over the inner optimizer, whose parameter groups hold the masters."""

    _inner_name = "optimizer"
    optimizer: Any

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise RuntimeError(
            "FP16_Optimizer was given to a GradScaler, but scales the loss itself; use "
            "optimizer.backward(loss) and optimizer.step() without GradScaler, or GradScaler with "
            "the inner optimizer alone"
        )

    def refresh_hyperparameters(self) -> None:
        """Make the step in a captured CUDA graph use the present options of the groups.

        Call it between replays; see `FusedAdam.refresh_hyperparameters`.
        """
        self.optimizer.refresh_hyperparameters()

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")

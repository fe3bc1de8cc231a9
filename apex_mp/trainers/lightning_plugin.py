"""The base class of the plugins for `lightning` and `pytorch_lightning`; imports neither."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from apex_mp.amp import GradScaler
from apex_mp.masters.cast_parameters import warn_of_rounded_buffers
from apex_mp.trainers.common import has_half_grads


class ScaledPrecision:
    """float16 training with a GradScaler of this package, for any optimizer, fused ones included.

    Gradients are unscaled before the hook `on_before_optimizer_step`; Lightning's own plugin does
    not unscale those of fused optimizers. Gradients in float16 stay scaled in the hook and during
    clipping by norm, because small ones would become 0 if unscaled in place.

    Args:
        precision: "16-mixed", torch.autocast over weights in float32; or "16-true", all weights and
            inputs in float16, for an optimizer with masters, `FusedAdam(master_weights=True)`
            ["16-mixed"].
        device: Where the model is trained: "cuda" or "cpu" ["cuda"].
        scaler: A scaler with other than the default settings [None: GradScaler(device)].

    Attributes:
        scaler: The scaler; `scaler.step_was_skipped(optimizer)` is for `lr_scheduler_step`.

    Raises:
        TypeError: `scaler` is not an `apex_mp.amp.GradScaler`.
        ValueError: `precision` is not one of these.
    """

    scaler: GradScaler
    # Defined by each plugin: HalfPrecision of its package.
    _half_precision: Callable[[str], Any]

    def __init__(
        self, precision: str = "16-mixed", device: str = "cuda", scaler: GradScaler | None = None
    ) -> None:
        if precision not in ("16-mixed", "16-true"):
            raise ValueError(
                f'FP16Plugin: precision is {precision!r}; it must be "16-mixed" or "16-true"'
            )
        if scaler is None:
            scaler = GradScaler(device)
        elif not isinstance(scaler, GradScaler):
            raise TypeError(
                f"FP16Plugin: scaler is a {type(scaler).__module__}.{type(scaler).__name__}; it "
                "must be an apex_mp.amp.GradScaler"
            )
        super().__init__("16-mixed", device, scaler)  # type: ignore[call-arg]
        self.precision = precision
        self._half = type(self)._half_precision(precision) if precision == "16-true" else None

    @property
    def _casts(self) -> Any:
        """The plugin whose methods convert the model and its inputs."""
        return super() if self._half is None else self._half

    def convert_module(self, module: torch.nn.Module) -> Any:
        converted = self._casts.convert_module(module)
        warn_of_rounded_buffers("FP16Plugin", converted)
        return converted

    def convert_input(self, data: Any) -> Any:
        return self._casts.convert_input(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._casts.tensor_init_context()  # type: ignore[no-any-return]

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._casts.module_init_context()  # type: ignore[no-any-return]

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._casts.forward_context()  # type: ignore[no-any-return]

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward and backward, call Lightning's hooks, clip, step and update the scale."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "FP16Plugin: LBFGS evaluates the loss several times in a step, and a GradScaler "
                "judges gradients once before it; train with precision 32-true or bf16-mixed"
            )
        result = closure()
        if result is None and model.automatic_optimization:
            return None  # training_step has returned None: there was no backward.
        if not has_half_grads(optimizer):
            self._unscale(optimizer)
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip gradients, scaled or not, with the result of torch's clipping of unscaled ones."""
        if clip_val <= 0:
            return
        # In manual optimization the optimizer is Lightning's wrapper.
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        by_norm = gradient_clip_algorithm == "norm"
        if not (by_norm and has_half_grads(optimizer)):
            self._unscale(optimizer)
        if by_norm:
            self.scaler.clip_grad_norm_(optimizer, clip_val)
        else:
            self.clip_grad_by_value(optimizer, clip_val)  # type: ignore[attr-defined]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the loss scale of a checkpoint that Lightning's own plugin has written."""
        theirs = checkpoint.get("MixedPrecision")
        if theirs:
            self.scaler.load_state_dict(theirs)

    def _unscale(self, optimizer: Any) -> None:
        if not self.scaler.is_enabled():
            return
        if self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.scaler.unscale_(optimizer)

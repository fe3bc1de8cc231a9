"""GradScaler of this package in Hugging Face accelerate, and so in transformers.Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp import GradScaler
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.masters.cast_parameters import warn_of_rounded_buffers
from apex_mp.saved.dcp import is_called_for_state
from apex_mp.trainers.common import grads_of, has_half_grads, missing_package

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise missing_package(__name__, error) from error

__all__ = [
    "attach_scaler",
]


def attach_scaler(accelerator: Accelerator, scaler: GradScaler) -> None:
    """Make an Accelerator scale losses by `scaler`, and know which steps were skipped.

    Call it before `accelerator.prepare`; with transformers on `trainer.accelerator`, before
    `trainer.train()`. On a CPU accelerate ignores `mixed_precision="fp16"`, so it must be "no";
    use `model.half()`, or `torch.autocast` around the forward.

    Gradients in float16 stay scaled when `accelerator.clip_grad_norm_` clips them: the step
    unscales and clips. All others are unscaled in place, as by accelerate.

    Args:
        accelerator: Changed in place: its class becomes a subclass of the same name.
        scaler: Replaces the scaler that accelerate has made, if any.

    Raises:
        RuntimeError: An optimizer has been prepared already.
        TypeError: An argument is of a wrong class.
        ValueError: The Accelerator trains in bf16 or fp8, or by DeepSpeed or Megatron-LM; or
            it would ignore "fp16".
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"attach_scaler: accelerator is a {type(accelerator).__name__}; it must be an "
            "accelerate.Accelerator (transformers: trainer.accelerator)"
        )
    if not isinstance(scaler, GradScaler):
        raise TypeError(
            f"attach_scaler: scaler is a {type(scaler).__module__}.{type(scaler).__name__}; it "
            "must be an apex_mp.amp.GradScaler, which knows whether a step was skipped"
        )
    if accelerator.distributed_type in ("DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"attach_scaler: {accelerator.distributed_type.value} scales losses by itself; set its "
            "scale in its own configuration"
        )
    if accelerator.mixed_precision not in ("no", "fp16"):
        raise ValueError(
            f"attach_scaler: mixed_precision is {accelerator.mixed_precision!r}; gradients are "
            'scaled for "fp16", or for "no" where the model itself is in float16. TRL takes bf16 '
            "unless its configuration has bf16=False"
        )
    if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
        raise ValueError(
            f'attach_scaler: accelerate ignores mixed_precision="fp16" on {accelerator.device}, '
            'and the model would compute in float32; use "no" with model.half(), or with '
            "torch.autocast around its forward"
        )
    if accelerator._optimizers:
        raise RuntimeError(
            "attach_scaler: accelerator.prepare has wrapped an optimizer without this scaler; "
            "call attach_scaler before it"
        )
    accelerator.scaler = scaler
    if not isinstance(accelerator, _Scaling):
        kind = type(accelerator)
        accelerator.__class__ = type(kind.__name__, (_Scaling, kind), {"__module__": __name__})


class _ScaledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer that asks the scaler whether its last step was skipped.

    accelerate's own test is whether `scaler.step` called `optimizer.step`, which it always does for
    a fused optimizer: that skips steps itself.
    """

    _has_stepped = False
    # Whether gradients have been unscaled or clipped since the last step.
    is_unscaled = False

    def step(self, closure: Any = None) -> None:
        if is_called_for_state():
            self.optimizer.step()  # Its gradients are 0, and no loss was scaled.
            return
        super().step(closure)
        if self.gradient_state.sync_gradients:
            self._has_stepped, self.is_unscaled = True, False

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; on a GPU the host waits for the answer."""
        return self._has_stepped and self.scaler.step_was_skipped(self.optimizer)


class _Scaling(Accelerator):  # type: ignore[misc]
    """The methods of an Accelerator that change when a scaler is attached."""

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        if isinstance(optimizer, FP16_Optimizer):
            raise TypeError(
                "accelerator.prepare: FP16_Optimizer scales losses by itself, and this Accelerator "
                "by the scaler attached to it; give it an optimizer that does not, such as "
                "FusedAdam(params, master_weights=True) for parameters in float16"
            )
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = _ScaledOptimizer
        return prepared

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Prepare a model as accelerate does, with a warning of buffers that 16 bits round."""
        prepared: torch.nn.Module = super().prepare_model(model, *args, **kwargs)
        warn_of_rounded_buffers("accelerator.prepare", prepared)
        return prepared

    # The optimizers whose parameters are being clipped; None: all.
    _clipped: list[AcceleratedOptimizer] | None = None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients in place, with mixed_precision="no" too.

        Args:
            optimizer: An optimizer or a list of them [None: all that were prepared].

        Raises:
            RuntimeError: Gradients of a second optimizer would be unscaled before a step.
        """
        if optimizer is None:
            optimizer = self._optimizers if self._clipped is None else self._clipped
        elif not isinstance(optimizer, (tuple, list)):
            optimizer = [optimizer]
        self._note_unscaled(optimizer)
        for each in optimizer:
            self.scaler.unscale_(_inner(each))

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip gradients as torch does; those in float16 are clipped by the step."""
        with self._clipping(parameters) as params:
            with_grad = {param for param in params if param.grad is not None}
            for prepared in self._optimizers:
                optimizer = _inner(prepared)
                owns_all = with_grad == grads_of(optimizer).keys()
                if norm_type == 2 and owns_all and has_half_grads(optimizer):
                    self._note_unscaled([prepared])
                    return self.scaler.clip_grad_norm_(optimizer, max_norm)  # type: ignore[no-any-return]
            return super().clip_grad_norm_(params, max_norm, norm_type)  # type: ignore[no-any-return]

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Unscale gradients in place, and clip each element as torch does."""
        with self._clipping(parameters) as params:
            super().clip_grad_value_(params, clip_value)

    @contextlib.contextmanager
    def _clipping(self, parameters: Tensor | Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Make `unscale_gradients()` in the block apply to the optimizers of these parameters."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._clipped = [
            prepared
            for prepared in self._optimizers
            if not grads_of(_inner(prepared)).keys().isdisjoint(params)
        ]
        try:
            yield params
        finally:
            self._clipped = None

    def _note_unscaled(self, optimizers: list[Any]) -> None:
        inner = {id(_inner(each)) for each in optimizers}
        unscaled = [each for each in self._optimizers if id(_inner(each)) in inner]
        waiting = [each for each in self._optimizers if each.is_unscaled and each not in unscaled]
        if len(unscaled + waiting) > 1:
            raise RuntimeError(
                "accelerator: gradients of a second optimizer are unscaled or clipped before the "
                "first has stepped. accelerate updates the scale after each optimizer.step(), and "
                "they would be unscaled twice; clip and step one optimizer after the other"
            )
        for each in unscaled:
            each.is_unscaled = True


def _inner(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer

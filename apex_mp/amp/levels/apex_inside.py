"""The attributes that apex put on an optimizer in amp.initialize; clients read and write them.

Nothing here reads these names: a client may replace or delete them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from apex_mp.amp.casts.casting import is_low
from apex_mp.amp.loss_scaling.loss_grads import LossGrads, Unscaling
from apex_mp.amp.loss_scaling.step_guard import guard_of
from apex_mp.amp.scaler import LossScaler
from apex_mp.core.grads.found_inf import FoundInf


def attach(optimizer: Any) -> None:
    """Put apex's attributes on an optimizer that went through `amp.initialize`."""
    has_masters = hasattr(optimizer, "_amp_masters")
    state = (StateWithMasters if has_masters else StateWithoutMasters)(optimizer)
    optimizer._amp_stash = state
    optimizer._amp_lazy_init = optimizer._lazy_init_maybe_master_weights = state._adopt
    optimizer._master_params_to_model_params = state._copy_to_model
    optimizer._prepare_amp_backward = state._prepare_backward
    optimizer._post_amp_backward = state._end_backward


class AmpOptimizerState:
    """`optimizer._amp_stash`: the parameters by dtype, and the pieces of `amp.scale_loss`.

    Lists are made when they are read; what is done to a list has no effect, what is done to its
    tensors has.

    Args:
        optimizer: The optimizer; not kept alive. None for a copy.

    Attributes:
        lazy_init_called: Whether there are masters; clients set it, too.
        already_patched: Whether a client has replaced `step` to skip one.
    """

    lazy_init_called = True
    already_patched = False

    def __init__(self, optimizer: Any) -> None:
        self._reference = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._is_scaled = False
        self._grads: LossGrads | None = None

    def __reduce__(self) -> Any:
        return type(self), (None,)  # A copy belongs to no optimizer.

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients were left scaled, by `delay_unscale` or a client's own block."""
        return self._is_scaled or guard_of(self._optimizer).scaled_by is not None

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        self._is_scaled = value
        if not value:
            guard = guard_of(self._optimizer)
            guard.scaled_by = None
            guard.scalers.clear()

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The model's parameters in 16 bits."""
        return _flat(self.fp16_groups)

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The same by group."""
        return [[model for _, model in pairs if is_low(model.dtype)] for pairs in self._pairs()]

    @property
    def dummy_overflow_buf(self) -> Tensor:
        """An int32 tensor of one element for calls of amp_C, new each time."""
        params = [master for pairs in self._pairs() for master, _ in pairs]
        return torch.zeros(1, dtype=torch.int32, device=params[0].device if params else None)

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        if optimizer is None:
            raise ReferenceError("_amp_stash: its optimizer is no more, or this one is a copy")
        return optimizer

    def _pairs(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield, for each group, what is stepped and the model's parameter, which may be one."""
        optimizer = self._optimizer
        model_of = getattr(optimizer, "_amp_model_of", {})
        for group in optimizer.param_groups:
            yield [(p, model_of.get(p, p)) for p in group["params"] if p.requires_grad]

    # Methods of the optimizer.

    def _adopt(self) -> None:
        """Do nothing: parameters have had masters, if any, since amp.initialize."""

    def _copy_to_model(self) -> None:
        """Write masters, rounded, to the model."""

    def _prepare_backward(self) -> None:
        """Set gradients aside before a backward of a scaled loss."""
        self._grads = LossGrads([self._optimizer], [None])
        self._grads.stash()

    def _end_backward(self, scaler: LossScaler) -> None:
        """Unscale the gradients of that backward, and add those that were set aside.

        Args:
            scaler: Has the scale, and gets to know whether gradients held inf or NaN.
        """
        optimizer, guard, scale = self._optimizer, guard_of(self._optimizer), scaler.loss_scale()
        grads, self._grads = self._grads, None
        if grads is None:  # They were left scaled.
            grads = LossGrads([optimizer], [scale])
            grads.stash()
        unscaling = Unscaling(scale, [FoundInf()])
        grads.unscale(unscaling)
        scaler.note_overflow(bool(unscaling.found_inf) or bool(unscaling.found_in_sums[0]))
        self.params_have_scaled_gradients = False
        guard.scaler, guard.scale = scaler, scale


class StateWithoutMasters(AmpOptimizerState):
    """That of an optimizer that steps the model's own parameters: O0, O1, O3."""

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The parameters in float32."""
        return [p for pairs in self._pairs() for p, _ in pairs if not is_low(p.dtype)]

    @property
    def all_fp16_grad_stash(self) -> list[Tensor | None]:
        """None for each of `all_fp16_params`: gradients are set aside elsewhere."""
        return [None] * len(self.all_fp16_params)

    @property
    def all_fp32_grad_stash(self) -> list[Tensor | None]:
        """None for each of `all_fp32_params`."""
        return [None] * len(self.all_fp32_params)


class StateWithMasters(AmpOptimizerState):
    """That of an optimizer with float32 masters: O2."""

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters of `all_fp16_params`."""
        return _flat(self.fp32_from_fp16_groups)

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The same by group."""
        return [[p for p, model in pairs if is_low(model.dtype)] for pairs in self._pairs()]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The model's parameters in float32, such as those of batch norms."""
        return _flat(self.fp32_from_fp32_groups)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The same by group."""
        return [[p for p, model in pairs if not is_low(model.dtype)] for pairs in self._pairs()]

    @property
    def all_fp32_from_fp32_grad_stash(self) -> list[Tensor | None]:
        """None for each of `all_fp32_from_fp32_params`: gradients are set aside elsewhere."""
        return [None] * len(self.all_fp32_from_fp32_params)

    def _adopt(self) -> None:
        """Give masters to parameters that require grad only now."""
        self._optimizer._amp_masters.adopt_all(self._optimizer, {})

    def _copy_to_model(self) -> None:
        self._optimizer._amp_masters.copy_to_model()

    def _prepare_backward(self) -> None:
        self._optimizer._amp_masters.begin_block(self._optimizer)
        super()._prepare_backward()

    def _end_backward(self, scaler: LossScaler) -> None:
        super()._end_backward(scaler)
        self._optimizer._amp_masters.end_block()


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [param for group in groups for param in group]

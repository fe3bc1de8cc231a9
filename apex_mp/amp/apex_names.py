"""The names by which clients of apex read and write its loss scaler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.core.grads.found_inf import FoundInf, inverse
from apex_mp.core.step import readback
from apex_mp.loss_scale import (
    AMP_PRESET,
    FLOAT32_SMALLEST_NORMAL,
    DynamicLossScale,
    StaticLossScale,
)


class _Field:
    """An attribute by apex's name, which is a field of `value`.

    Args:
        name: The field.
        converted: Makes its value of what is written; without that field a write has no effect.
        without: What is read if the loss scale has no such field [None].
    """

    def __init__(self, name: str, converted: Callable[[Any], Any], without: Any = None) -> None:
        self._name, self._converted, self._without = name, converted, without

    def __get__(self, scaler: Any, _: type) -> Any:
        return getattr(scaler.value, self._name, self._without)

    def __set__(self, scaler: Any, given: Any) -> None:
        if hasattr(scaler.value, self._name):
            values = {self._name: self._converted(given)}
            scaler.value = dataclasses.replace(scaler.value, **values)


class ApexNames:
    """The part of `LossScaler` under apex's names.

    Attributes:
        value: The scale and its state.
    """

    value: DynamicLossScale | StaticLossScale
    has_fused_kernel = True
    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    _overflowed = False  # since the last block
    _is_counted = False  # in the scale
    _buffer: Tensor | None = None  # a client's, which its calls of amp_C write

    _loss_scale = _Field("scale", float)
    _unskipped = _Field("good_steps", int, 0)
    _scale_seq_len = _Field("growth_interval", int, AMP_PRESET.growth_interval)
    _max_loss_scale = _Field("max_scale", float, AMP_PRESET.max_scale)
    _min_loss_scale = _Field("min_scale", lambda scale: float(scale or FLOAT32_SMALLEST_NORMAL))

    @property
    def dynamic(self) -> bool:
        """Whether the scale is dynamic."""
        raise NotImplementedError

    @property
    def lowest(self) -> float | None:
        """The smallest scale that it backs off to; None if it never backs off."""
        raise NotImplementedError

    def note_overflow(self, found_inf: bool) -> None:
        """Remember whether gradients held inf or NaN."""
        raise NotImplementedError

    @property
    def _has_overflow(self) -> bool:
        readback.wait()
        return self._overflowed

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._overflowed, self._is_counted = bool(value), False

    @property
    def _overflow_buf(self) -> Tensor:
        """An int32 tensor of one element, not 0 after an overflow; `update_scale` reads it."""
        if self._buffer is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            value = int(self._has_overflow and not self._is_counted)
            self._buffer = torch.full((1,), value, dtype=torch.int32, device=device)
        return self._buffer

    @_overflow_buf.setter
    def _overflow_buf(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._overflowed = self._overflowed and self._is_counted  # The buffer decides.

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: Any = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write gradients divided by the scale, and note whether they held inf or NaN.

        Args:
            model_grads: Scaled gradients.
            master_grads: Where they go; may be the same.
            unused_scale: No effect [None].
            models_are_masters: No effect [False].
            scale_override: The divisor [None: the scale].
        """
        found = FoundInf()
        scale = self.value.scale if scale_override is None else scale_override
        found.unscale(model_grads, master_grads, inverse(scale))
        self.note_overflow(bool(found))

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write the sum of new gradients, divided by the scale, and of earlier ones.

        Args:
            model_grads: Scaled gradients.
            stashed_master_grads: Earlier gradients.
            master_grads: Where the sums go.
            scale_override: The divisors of both, and a factor on the sum [None: the scale, 1, 1].
        """
        new, earlier, out = scale_override or (self.value.scale, 1.0, 1.0)
        found = FoundInf()
        with torch.no_grad():
            for stashed, master in zip(stashed_master_grads, master_grads, strict=True):
                master.copy_(stashed * (out / earlier))
        found.add_unscaled(model_grads, master_grads, inverse(new / out))
        self.note_overflow(bool(found))

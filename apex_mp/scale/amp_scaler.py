"""The loss scaler of amp: names and defaults of 2019 around a value of apex_mp.loss_scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import readback
from apex_mp.core.state_checks import as_dict
from apex_mp.grads.found_inf import FoundInf, inverse
from apex_mp.loss_scale import (
    AMP_PRESET,
    FLOAT32_SMALLEST_NORMAL,
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    from_grad_scaler,
    is_of_grad_scaler,
)
from apex_mp.scale import fp16_scalers
from apex_mp.scale.device_scale import DeviceScale


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


WISH = 'it must be a number or "dynamic", or a loss scale of apex_mp.loss_scale'
# Defaults of the LossScaler arguments that may not be given beside a dynamic loss scale.
_BESIDE = (
    AMP_PRESET.scale,
    AMP_PRESET.growth_factor,
    AMP_PRESET.growth_interval,
    None,
    AMP_PRESET.max_scale,
)


class LossScaler(ApexNames):
    """The scale of one loss, and whether its gradients overflowed.

    Args:
        loss_scale: "dynamic", a number that stays, or a loss scale of `apex_mp.loss_scale`, or a
            scaler that has one ["dynamic"].
        init_scale: Where a dynamic scale starts [2**16].
        scale_factor: Growth multiplies by it, backing off divides by it; more than 1 [2].
        scale_window: Good steps before the scale grows [2000].
        min_loss_scale: A dynamic scale does not back off below it [None: 1 once gradients have 16
            bits; else no floor].
        max_loss_scale: A dynamic scale does not grow above it, nor start there [2**24].

    Raises:
        TypeError: An argument is not a number; `loss_scale` may be "dynamic".
        ValueError: An argument is out of range, or is given beside a dynamic loss scale that has
            one of its own.
    """

    _has_floor = True  # Pickles of earlier versions have what they had.

    def __init__(
        self,
        loss_scale: float | str | LossScale = "dynamic",
        init_scale: float = AMP_PRESET.scale,
        scale_factor: float = AMP_PRESET.growth_factor,
        scale_window: int = AMP_PRESET.growth_interval,
        min_loss_scale: float | None = None,
        max_loss_scale: float = AMP_PRESET.max_scale,
    ) -> None:
        self._device_scale: DeviceScale | None = None  # holds the scale, if it is not None
        beside = (init_scale, scale_factor, scale_window, min_loss_scale, max_loss_scale)
        held = held_value(loss_scale)
        self._has_floor = held is not None or min_loss_scale is not None
        if held is not None:
            if isinstance(held, DynamicLossScale) and beside != _BESIDE:
                raise ValueError(
                    f"loss_scale is {held!r}, and arguments beside it ask for other bounds or "
                    "factors; give them in the loss scale alone"
                )
            self.value = held
        elif loss_scale == "dynamic":
            if min_loss_scale is None or min_loss_scale == 0:
                min_loss_scale = FLOAT32_SMALLEST_NORMAL
            value = DynamicLossScale(
                init_scale,
                growth_factor=scale_factor,
                backoff_factor=1.0 / scale_factor,
                growth_interval=scale_window,
                min_scale=min_loss_scale,
                max_scale=max_loss_scale,
            )
            self.value = dataclasses.replace(value, scale=min(value.scale, value.max_scale))
        elif isinstance(loss_scale, str):
            raise ValueError(f"loss_scale is {loss_scale!r}; {WISH}")
        elif isinstance(loss_scale, bool) or not isinstance(loss_scale, (int, float)):
            raise TypeError(f"loss_scale is {loss_scale!r}; {WISH}")
        else:
            self.value = StaticLossScale(loss_scale)

    @property
    def value(self) -> DynamicLossScale | StaticLossScale:
        """The scale and its state, a frozen object of apex_mp.loss_scale."""
        return self._value if self._device_scale is None else self._device_scale.read()

    @value.setter
    def value(self, value: DynamicLossScale | StaticLossScale) -> None:
        self._value = value
        self._device_scale = None

    def on(self, device: torch.device) -> DeviceScale:
        """Return the scale on a device; it stays there until the host sets it."""
        if self._device_scale is None or self._device_scale.device != device:
            self._device_scale = DeviceScale(self.value, device)
        return self._device_scale

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_value": self.value, "_device_scale": None, "_buffer": None}
        if self._buffer is not None and not self._is_counted:
            state["_overflowed"] = self._overflowed or bool(self._buffer.item())
        return state

    @property
    def dynamic(self) -> bool:
        """Whether the scale is dynamic."""
        return isinstance(self._value, DynamicLossScale)

    def loss_scale(self) -> float:
        """The factor on the loss."""
        return self.value.scale

    @property
    def lowest(self) -> float | None:
        """The smallest scale that it backs off to; None if it never backs off."""
        held = self._value  # The bounds; the scale may be on a device.
        return held.min_scale if isinstance(held, DynamicLossScale) else None

    def note_16_bit_gradients(self) -> None:
        """Do not back off below 1 from now on, unless a floor was given."""
        value = self._value
        if not self._has_floor and isinstance(value, DynamicLossScale):
            lowest = min(1.0, value.max_scale)
            self.value = dataclasses.replace(self.value, min_scale=lowest)  # type: ignore[arg-type]
        self._has_floor = True

    # Overflows.

    def clear_overflow_state(self) -> None:
        """Forget that gradients overflowed."""
        self._overflowed = self._is_counted = False
        if self._buffer is not None:
            self._buffer.zero_()

    def note_overflow(self, found_inf: bool, *, is_counted: bool = False) -> None:
        """Remember whether gradients held inf or NaN.

        Args:
            found_inf: Whether they did.
            is_counted: The scale has been updated for them; else `update_scale` does that [False].
        """
        if self._is_counted or is_counted:
            self.clear_overflow_state()
        self._overflowed, self._is_counted = self._overflowed or found_inf, is_counted
        if found_inf and self._buffer is not None:
            self._buffer.fill_(1)

    def update_scale(self) -> bool:
        """Update the scale for overflows since the last update; return whether to skip the step."""
        should_skip = self._overflowed and not self._is_counted
        if self._buffer is not None and self.dynamic:
            should_skip = should_skip or bool(self._buffer.item())
        value = self.value.update(should_skip)
        if value is not self._value or self._device_scale is not None:
            self.value = value
        self._overflowed, self._is_counted = should_skip, True
        return should_skip

    # Checkpoints: the two numbers of 2019, and the state that has come since.

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: the scale, and good steps and overflows since it changed."""
        state = {"loss_scale": self.value.scale, "unskipped": self._unskipped}
        if isinstance(self.value, DynamicLossScale):
            state["overflows"] = self.value.overflows
        return state

    def load_state_dict(self, state: Any) -> None:
        """Load a state: ours, one of 2019, a GradScaler's, or a pickled loss scaler.

        A dynamic scale stays dynamic and a static one static. Bounds stay if the state has none.

        Raises:
            KeyError: An entry is missing.
            TypeError: One is not a number.
            ValueError: One is out of range.
        """
        saved = _value_of(state)
        if saved is None:
            state = as_dict("LossScaler", state)
        if not isinstance(self.value, DynamicLossScale):
            self.value = StaticLossScale(state["loss_scale"] if saved is None else saved.scale)
        elif saved is None:
            self.value = dataclasses.replace(
                self.value,
                scale=state["loss_scale"],
                good_steps=state["unskipped"],
                overflows=state.get("overflows", 0),
            )
        elif isinstance(saved, StaticLossScale):
            self.value = dataclasses.replace(
                self.value, scale=saved.scale, good_steps=0, overflows=0
            )
        elif is_of_grad_scaler(state):
            self.value = dataclasses.replace(
                saved, min_scale=self.value.min_scale, max_scale=self.value.max_scale
            )
        else:
            self.value = saved


def _value_of(state: Any) -> DynamicLossScale | StaticLossScale | None:
    """Return the loss scale that a state describes in full; None for the two numbers of 2019."""
    if is_of_grad_scaler(state):
        return from_grad_scaler(state)
    return held_value(state)


def held_value(given: Any) -> DynamicLossScale | StaticLossScale | None:
    """Return the value of a loss scale or loss scaler; None if `given` is neither."""
    if isinstance(given, fp16_scalers.LossScaler | fp16_scalers.DynamicLossScaler):
        return given.loss_scale_value
    if isinstance(given, NoOpLossScale):
        return StaticLossScale(given.scale)
    value = given.value if isinstance(given, LossScaler) else given
    return value if isinstance(value, DynamicLossScale | StaticLossScale) else None

"""The loss scale as a frozen object: none, static, or dynamic with one update rule.

A loss is multiplied by `scale` before backward and its gradients by `inv_scale` after it, so that
small gradients survive float16. After each step `update(found_inf)` returns the next loss scale:

    loss_scale = DynamicLossScale()
    ...
    (loss * loss_scale.scale).backward()
    found_inf = unscale(grads, loss_scale.inv_scale)
    if not found_inf:
        step()
    loss_scale = loss_scale.update(found_inf)

Callers skip the step if `found_inf`, with every kind of loss scale: the kind only determines the
next scale. `csrc/math/update_scale.h` has the same rule for devices; tests compare the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "StaticLossScale",
    "from_dict",
    "from_grad_scaler",
    "to_dict",
]

FLOAT32_MAX = math.ldexp(2.0 - 2.0**-23, 127)
# The smallest scale: its inverse is finite in float32, and no device flushes it to zero.
FLOAT32_SMALLEST_NORMAL = 2.0**-126
INT32_MAX = 2**31 - 1


class Rule(NamedTuple):
    """How a dynamic loss scale changes: fields of `DynamicLossScale`, in the order of C++."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float
    hysteresis: int


@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """Do not scale: for bfloat16 and float32, whose gradients do not underflow."""

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        return 1.0

    @property
    def inv_scale(self) -> float:
        """1 / scale, by which scaled gradients are multiplied."""
        return 1.0

    def update(self, found_inf: bool) -> NoOpLossScale:
        """Return this object: it never changes.

        Args:
            found_inf: Ignored.
        """
        return self


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """Scale by one number that never changes.

        loss_scale = StaticLossScale(128.0)

    Args:
        scale: Factor on the loss, a positive normal float32 number.

    Raises:
        TypeError: `scale` is not a number.
        ValueError: `scale` is out of range.
    """

    scale: float

    def __post_init__(self) -> None:
        check_floats(self, "scale", low=FLOAT32_SMALLEST_NORMAL, high=FLOAT32_MAX)

    @property
    def inv_scale(self) -> float:
        """1 / scale, by which scaled gradients are multiplied."""
        return 1.0 / self.scale

    def update(self, found_inf: bool) -> StaticLossScale:
        """Return this object: an overflow skips the step, but the scale stays.

        Args:
            found_inf: Ignored.
        """
        return self


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """Adjust the scale to the gradients: back off after overflows, grow after good steps.

    The rule of `update`, once a step:

        if found_inf:                               # the caller skips this step
            good_steps = 0
            if overflows < hysteresis - 1:          # tolerate it
                overflows += 1
            else:                                   # back off
                scale = max(scale * backoff_factor, min_scale)
        else:                                       # a good step alone leaves overflows as they are
            good_steps += 1
            if good_steps >= growth_interval:       # grow
                scale = min(scale * growth_factor, max_scale)    unless that exceeds float32
                good_steps = overflows = 0

    So once the budget is used up each overflow backs off, until the scale has grown again, as in
    Megatron-LM and in DeepSpeed.

    A bound only stops the scale: one that starts below `min_scale` is not raised by an overflow,
    and one that starts above `max_scale` is not lowered by good steps. A growth that `max_scale` or
    float32 prevents counts as a growth, so it clears both counts too.

    The product is taken in double precision and rounded to float32, on the host as on the device.
    With hysteresis=1, max_scale=inf and factors of two this is the rule of `torch.amp.GradScaler`
    to the bit (with other factors too, unless a product lies within half an ulp above the largest
    float32), as long as the scale stays above `min_scale`: GradScaler's own scale backs off to 0 if
    overflows do not end.

    Args:
        scale: Factor on the loss, a positive normal float32 number [2**16].
        growth_factor: Growth multiplies the scale by this, at least 1; 1 never grows [2].
        backoff_factor: Backing off multiplies the scale by this, between 0 and 1 [0.5].
        growth_interval: Good steps in a row before the scale grows, at least 1 [2000].
        min_scale: The scale does not back off below this, a positive normal float32 number
            [2**-126].
        max_scale: The scale does not grow above this, at least `min_scale`; inf leaves only
            float32's own bound [inf].
        hysteresis: Overflows until the scale backs off, at least 1 [1].
        good_steps: State: good steps since the last overflow or growth [0].
        overflows: State: overflows since the last growth, at which the scale stayed [0].

    Raises:
        TypeError: A field is not a number, or a count is not an int.
        ValueError: A field is out of range.
    """

    scale: float = 2.0**16
    _: dataclasses.KW_ONLY
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = FLOAT32_SMALLEST_NORMAL
    max_scale: float = math.inf
    hysteresis: int = 1
    good_steps: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        check_floats(self, "scale", "min_scale", low=FLOAT32_SMALLEST_NORMAL, high=FLOAT32_MAX)
        check_floats(self, "max_scale", low=self.min_scale, high=math.inf)
        check_floats(self, "growth_factor", low=1.0, high=FLOAT32_MAX)
        check_floats(self, "backoff_factor", low=0.0, high=1.0, excluding_ends=True)
        check_ints(self, "growth_interval", "hysteresis", low=1)
        check_ints(self, "good_steps", "overflows", low=0)

    @property
    def inv_scale(self) -> float:
        """1 / scale, by which scaled gradients are multiplied."""
        return 1.0 / self.scale

    @property
    def rule(self) -> Rule:
        """The fields that are no state."""
        return Rule(*(getattr(self, name) for name in Rule._fields))

    def update(self, found_inf: bool) -> DynamicLossScale:
        """Return the loss scale of the next step; the rule is in the docstring of the class.

        Args:
            found_inf: Whether this step's gradients held inf or NaN, so that it is skipped.
        """
        if found_inf:
            if self.overflows + 1 >= self.hysteresis:
                return self._next(self._backed_off(), good_steps=0, overflows=self.overflows)
            return self._next(self.scale, good_steps=0, overflows=self.overflows + 1)
        if self.good_steps + 1 >= self.growth_interval:
            return self._next(self._grown(), good_steps=0, overflows=0)
        return self._next(self.scale, good_steps=self.good_steps + 1, overflows=self.overflows)

    def _backed_off(self) -> float:
        smaller = max(self.scale * self.backoff_factor, self.min_scale)
        return round_to_float32(smaller) if smaller < self.scale else self.scale

    def _grown(self) -> float:
        larger = min(self.scale * self.growth_factor, self.max_scale)
        return round_to_float32(larger) if self.scale < larger <= FLOAT32_MAX else self.scale

    def _next(self, scale: float, *, good_steps: int, overflows: int) -> DynamicLossScale:
        # Not by replace(): what the rule makes of numbers in range need not be checked.
        following = object.__new__(type(self))
        changes = {"scale": scale, "good_steps": good_steps, "overflows": overflows}
        vars(following).update(vars(self), **changes)
        return following


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale

_KINDS: dict[str, type[NoOpLossScale | StaticLossScale | DynamicLossScale]] = {
    "noop": NoOpLossScale,
    "static": StaticLossScale,
    "dynamic": DynamicLossScale,
}


def to_dict(loss_scale: LossScale) -> dict[str, Any]:
    """Return a loss scale as plain values for a checkpoint: its kind and its fields.

    Args:
        loss_scale: One of the three of this module.
    """
    kind = next(kind for kind, cls in _KINDS.items() if type(loss_scale) is cls)
    return {"kind": kind, **dataclasses.asdict(loss_scale)}


def from_dict(values: Mapping[str, Any]) -> LossScale:
    """Return the loss scale for the result of `to_dict`.

    Args:
        values: The result of `to_dict`.

    Raises:
        TypeError: A field is unknown or missing, or is not a number.
        ValueError: The kind is unknown, or a field is out of range.
    """
    fields = dict(values)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"loss_scale.from_dict: kind is {kind!r}; it must be one of {[*_KINDS]}")
    return _KINDS[kind](**fields)


_GRAD_SCALER_FIELDS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "good_steps",
}


def is_of_grad_scaler(state: Any) -> bool:
    """Return whether a dict has keys of the state of a `torch.amp.GradScaler`."""
    return isinstance(state, Mapping) and {"scale", "growth_factor"} <= state.keys()


def from_grad_scaler(state: Mapping[str, Any]) -> DynamicLossScale:
    """Return the loss scale that a `torch.amp.GradScaler`'s state_dict describes.

    Args:
        state: What `state_dict` of the scaler returned.

    Raises:
        TypeError: A value is not a number.
        ValueError: A key is missing, or a value is out of range.
    """
    missing = [key for key in _GRAD_SCALER_FIELDS if key not in state]
    if missing:
        raise ValueError(
            f"loss_scale.from_grad_scaler: keys {missing} are missing; the dict has {[*state]}"
        )
    return DynamicLossScale(**{field: state[key] for key, field in _GRAD_SCALER_FIELDS.items()})


def round_to_float32(x: float) -> float:
    """Return a number in the range of normal float32 numbers, rounded to float32."""
    # 24 bits of mantissa remain; round() takes ties to even.
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)


def check_floats(
    owner: object, *names: str, low: float, high: float, excluding_ends: bool = False
) -> None:
    """Make attributes of an object floats.

    Raises:
        TypeError: One is no number.
        ValueError: One is not between `low` and `high`, or is one of them if `excluding_ends`.
    """
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{_is(owner, name, value)}; it must be a number")
        inside = low < value < high if excluding_ends else low <= value <= high
        if not inside:  # NaN is never inside.
            interval = f"({low}, {high})" if excluding_ends else f"[{low}, {high}]"
            raise ValueError(f"{_is(owner, name, value)}; it must lie in {interval}")
        object.__setattr__(owner, name, float(value))


def check_ints(owner: object, *names: str, low: int) -> None:
    """Check that attributes of an object are ints.

    Raises:
        TypeError: One is no int.
        ValueError: One is less than `low`, or too large for a C int.
    """
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{_is(owner, name, value)}; it must be an int")
        if not low <= value <= INT32_MAX:
            raise ValueError(f"{_is(owner, name, value)}; it must lie in [{low}, {INT32_MAX}]")


def _is(owner: object, name: str, value: object) -> str:
    return f"{type(owner).__name__}: {name} is {value!r}"


# The defaults of apex's three loss scalers.
AMP_PRESET = DynamicLossScale(2.0**16, growth_interval=2000, max_scale=2.0**24)
FP16_UTILS_PRESET = DynamicLossScale(2.0**32, growth_interval=1000, min_scale=1.0)
FUSED_PRESET = DynamicLossScale(2.0**16, growth_interval=1000, min_scale=1.0)

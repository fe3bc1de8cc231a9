"""amp's LossScaler: the numbers and names of 2019 around the one rule of loss_scale."""

from __future__ import annotations

from typing import Any

import pytest
from fp16_cases import NAN

from apex_mp.loss_scale import DynamicLossScale
from apex_mp.scale.amp_scaler import LossScaler

pytestmark = pytest.mark.usefixtures("amp_off")


def after(scaler: LossScaler, overflows: str) -> LossScaler:
    """Update once for each letter: x for an overflow, a dot for a good step."""
    for letter in overflows:
        scaler._has_overflow = letter == "x"
        assert scaler.update_scale() is (letter == "x")
    return scaler


# The old numbers.


@pytest.mark.parametrize(
    ("options", "overflows", "scale"),
    [
        ({"init_scale": 8.0}, "", 8.0),
        ({"init_scale": 2.0**30}, "", 2.0**24),
        ({"init_scale": 8.0, "max_loss_scale": 4.0}, "", 4.0),
        ({"init_scale": 8.0, "scale_factor": 4.0}, "x", 2.0),
        ({"init_scale": 8.0, "scale_window": 2}, "..", 16.0),
        ({"init_scale": 8.0, "scale_window": 1, "max_loss_scale": 16.0}, "...", 16.0),
        ({"init_scale": 8.0, "min_loss_scale": 4.0}, "xxx", 4.0),
        ({"init_scale": 8.0, "min_loss_scale": 0}, "xxxx", 0.5),
        ({"loss_scale": 128.0}, "x.x.", 128.0),
    ],
)
def test_the_arguments_say_how_the_scale_moves(
    options: dict[str, Any], overflows: str, scale: float
) -> None:
    assert after(LossScaler(**options), overflows).loss_scale() == scale


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"loss_scale": "static"}, ValueError, 'it must be a number or "dynamic"'),
        ({"loss_scale": 0.0}, ValueError, "scale is 0.0"),
        ({"loss_scale": NAN}, ValueError, "scale is nan"),
        ({"loss_scale": None}, TypeError, "scale is None"),
        ({"scale_window": 0}, ValueError, "growth_interval is 0"),
        ({"min_loss_scale": 2.0**25}, ValueError, "max_scale is"),
    ],
)
def test_a_wrong_argument_is_named(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        LossScaler(**options)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"unskipped": 7}, KeyError),
        ({"loss_scale": "x", "unskipped": 7}, TypeError),
        ({"loss_scale": 0.0, "unskipped": 7}, ValueError),
        ({"loss_scale": 8.0, "unskipped": -1}, ValueError),
    ],
)
def test_a_state_that_is_none_changes_nothing(
    state: dict[str, Any], error: type[Exception]
) -> None:
    scaler = LossScaler()
    before = scaler.value
    with pytest.raises(error):
        scaler.load_state_dict(state)
    assert scaler.value == before


def test_an_overflow_is_remembered_until_the_scale_is_updated() -> None:
    scaler = LossScaler()
    scaler.note_overflow(True)
    scaler.note_overflow(False)
    assert scaler.update_scale() is True
    assert scaler.update_scale() is False
    scaler.note_overflow(True)
    scaler.clear_overflow_state()
    assert scaler.update_scale() is False


def test_overflows_since_the_scale_changed_are_saved() -> None:
    scaler = after(LossScaler(DynamicLossScale(hysteresis=3)), "xx")
    resumed = LossScaler(DynamicLossScale(hysteresis=3))
    resumed.load_state_dict(scaler.state_dict())
    assert after(resumed, "x").loss_scale() == after(scaler, "x").loss_scale() == 2.0**15

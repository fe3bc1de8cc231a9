"""amp's LossScaler: the numbers and names of 2019 around the one rule of loss_scale."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from fp16_cases import INF, NAN

from apex_mp import amp
from apex_mp.amp.scaler import LossScaler
from apex_mp.loss_scale import DynamicLossScale

pytestmark = pytest.mark.usefixtures("amp_off")

SMALLEST_NORMAL = 2.0**-126


def test_overflows_since_the_scale_changed_are_saved() -> None:
    scaler = after(LossScaler(DynamicLossScale(hysteresis=3)), "xx")
    resumed = LossScaler(DynamicLossScale(hysteresis=3))
    resumed.load_state_dict(scaler.state_dict())
    assert after(resumed, "x").loss_scale() == after(scaler, "x").loss_scale() == 2.0**15


def after(scaler: LossScaler, overflows: str) -> LossScaler:
    """Update once for each letter: x for an overflow, a dot for a good step."""
    for letter in overflows:
        scaler._has_overflow = letter == "x"
        assert scaler.update_scale() is (letter == "x")
    return scaler


# The old numbers.


def test_a_dynamic_scale_starts_at_65536() -> None:
    assert LossScaler().loss_scale() == 65536.0
    assert LossScaler().dynamic is True


def test_2000_good_steps_double_the_scale() -> None:
    scaler = after(LossScaler(), "." * 1999)
    assert (scaler.loss_scale(), scaler._unskipped) == (65536.0, 1999)
    after(scaler, ".")
    assert (scaler.loss_scale(), scaler._unskipped) == (131072.0, 0)


def test_the_scale_stops_at_16777216() -> None:
    scaler = LossScaler()
    for _ in range(9):
        scaler._unskipped = 1999
        after(scaler, ".")
    assert scaler.loss_scale() == 16777216.0


def test_an_overflow_halves_the_scale_and_starts_counting_anew() -> None:
    scaler = after(LossScaler(), "...x")
    assert (scaler.loss_scale(), scaler._unskipped) == (32768.0, 0)


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


def test_endless_overflow_leaves_a_positive_normal_number() -> None:
    scaler = after(LossScaler(), "x" * 300)
    assert scaler.loss_scale() == SMALLEST_NORMAL
    assert 1.0 / scaler.loss_scale() < INF


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


def test_init_sets_the_bounds_of_its_scale(device: torch.device) -> None:
    handle: Any = amp.init(device_type=device.type, min_loss_scale=2.0**15, max_loss_scale=2.0**16)
    assert after(handle._default_scaler, "xxx").loss_scale() == 2.0**15
    for _ in range(3):
        handle._default_scaler._unskipped = 1999
        after(handle._default_scaler, ".")
    assert handle._default_scaler.loss_scale() == 2.0**16
    wrapped = handle.wrap_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    assert after(wrapped._loss_scaler[0], "xxx").loss_scale() == 2.0**15


# The old names.


def test_the_private_names_of_2019_are_read_and_written() -> None:
    scaler = LossScaler()
    scaler._loss_scale = 1.0
    assert scaler.loss_scale() == scaler._loss_scale == 1.0
    scaler._unskipped = 1999
    assert after(scaler, ".").loss_scale() == 2.0
    fixed = LossScaler(128.0)
    fixed._loss_scale = 64.0
    assert fixed.loss_scale() == 64.0
    assert fixed._unskipped == 0


def test_a_written_scale_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"scale is -1\.0"):
        LossScaler()._loss_scale = -1.0


def test_an_overflow_is_remembered_until_the_scale_is_updated() -> None:
    scaler = LossScaler()
    scaler.note_overflow(True)
    scaler.note_overflow(False)
    assert scaler.update_scale() is True
    assert scaler.update_scale() is False
    scaler.note_overflow(True)
    scaler.clear_overflow_state()
    assert scaler.update_scale() is False


# Checkpoints.


def test_the_state_survives_a_file_of_weights_only() -> None:
    scaler = after(LossScaler(), "x..")
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    other = LossScaler()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.value == scaler.value
    assert (other.loss_scale(), other._unskipped) == (32768.0, 2)


def test_the_state_of_2019_is_loaded() -> None:
    scaler = LossScaler()
    scaler.load_state_dict({"loss_scale": 512.0, "unskipped": 7})
    assert (scaler.loss_scale(), scaler._unskipped) == (512.0, 7)
    fixed = LossScaler(128.0)
    fixed.load_state_dict({"loss_scale": 512.0, "unskipped": 7})
    assert fixed.loss_scale() == 512.0


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

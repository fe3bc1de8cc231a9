"""A value of apex_mp.loss_scale is taken wherever a loss scale is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fp16_cases import BF16, F16, faces, ones

from apex_mp import amp, fp16_utils
from apex_mp.loss_scale import DynamicLossScale, StaticLossScale

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

# Each bound, the interval and the hysteresis are met on the way.
VALUE = DynamicLossScale(
    2.0**10,
    growth_factor=4.0,
    backoff_factor=0.25,
    growth_interval=2,
    min_scale=2.0**7,
    max_scale=2.0**13,
    hysteresis=2,
    good_steps=1,
    overflows=1,
)


def sgd(dtype: torch.dtype = F16) -> torch.optim.SGD:
    return torch.optim.SGD([ones(2, dtype=dtype)], lr=0.25)


def fp16_optimizer(loss_scale: Any) -> Any:
    return fp16_utils.FP16_Optimizer(sgd(), dynamic_loss_scale=loss_scale, verbose=False)


def static_argument(loss_scale: Any) -> Any:
    return fp16_utils.FP16_Optimizer(sgd(), loss_scale, verbose=False)


def assigned(loss_scale: Any) -> Any:
    optimizer = fp16_utils.FP16_Optimizer(sgd(), verbose=False)
    optimizer.loss_scaler = loss_scale
    return optimizer


def switched(loss_scale: Any) -> Any:
    optimizer = fp16_utils.FP16_Optimizer(sgd(), verbose=False)
    optimizer.dynamic_loss_scale = loss_scale
    return optimizer


@pytest.mark.parametrize("take", [fp16_optimizer, static_argument, assigned, switched])
def test_a_loss_scale_is_followed_wherever_it_is_given(take: Any) -> None:
    optimizer, expected = take(VALUE), VALUE
    for letter in "...x......xxxxx.xx..x....x....":
        optimizer.loss_scaler.update_scale(letter == "x")
        expected = expected.update(letter == "x")
        assert optimizer.loss_scale == expected.scale


def init(loss_scale: Any) -> Any:
    return amp.init(loss_scale=loss_scale, device_type="cpu")


def initialize(loss_scale: Any) -> Any:
    return amp.initialize(torch.nn.Linear(1, 1), loss_scale=loss_scale, verbosity=0)


NOT_A_FLAG = [1024.0, 2, "False", "dynamic", "", [True], np.ones(2), torch.amp.GradScaler("cpu")]


@faces
@pytest.mark.parametrize("given", NOT_A_FLAG, ids=lambda given: repr(given)[:12])
def test_what_python_takes_for_true_is_refused_as_dynamic_loss_scale(given: Any, face: Any) -> None:
    sentence = "FP16_Optimizer: dynamic_loss_scale is .*; it must be True, False or a loss scale"
    inner = sgd()
    (weight,) = inner.param_groups[0]["params"]
    with pytest.raises(TypeError, match=sentence):
        face(inner, dynamic_loss_scale=given, verbose=False)
    assert inner.param_groups[0]["params"] == [weight]
    optimizer = face(inner, verbose=False)
    with pytest.raises(TypeError, match=sentence):
        optimizer.dynamic_loss_scale = given
    assert optimizer.dynamic_loss_scale is False


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"static_loss_scale": 0}, ValueError, "as in the scripts for BERT, pass dynamic_loss_sc"),
        ({"static_loss_scale": VALUE, "dynamic_loss_scale": True}, ValueError, "give it once"),
        (
            {"static_loss_scale": VALUE, "dynamic_loss_scale": StaticLossScale(8.0)},
            ValueError,
            "give it once",
        ),
        (
            {"dynamic_loss_scale": VALUE, "dynamic_loss_args": {"scale_window": 2}},
            ValueError,
            "give it once",
        ),
        (
            {"dynamic_loss_scale": DynamicLossScale(growth_factor=3.0)},
            ValueError,
            "backoff_factor is 0.5 and growth_factor 3.0; the one must be the inverse",
        ),
        (
            {"dynamic_loss_args": {"init_scal": 8.0}},
            TypeError,
            "dynamic_loss_args is .'init_scal': 8.0.; it must be a dict with some of the keys "
            r"\['init_scale', 'scale_factor', 'scale_window', 'min_loss_scale', ",
        ),
        ({"dynamic_loss_args": 9}, TypeError, "dynamic_loss_args is 9; it must be a dict"),
    ],
)
def test_arguments_that_ask_for_no_loss_scale_or_for_two_are_refused(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        fp16_utils.FP16_Optimizer(sgd(), verbose=False, **options)


@pytest.mark.parametrize("call", [init, initialize])
@pytest.mark.parametrize(
    "given",
    ["much", True, [8.0], torch.amp.GradScaler("cpu")],
    ids=lambda value: type(value).__name__,
)
def test_amp_refuses_what_is_no_loss_scale(given: Any, call: Any) -> None:
    if call is init and given == "much":
        given = b"much"  # A string there is an argument of early 2019.
    with pytest.raises((TypeError, ValueError), match='must be a number or "dynamic", or a loss'):
        call(given)


NOT_NEEDED = "a dynamic loss scale is not needed"


@faces
@pytest.mark.parametrize("flag", [True, VALUE], ids=["flag", "value"])
def test_a_dynamic_scale_for_bfloat16_alone_is_said_not_to_be_needed(
    flag: Any, face: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    face(sgd(BF16), dynamic_loss_scale=flag)
    assert NOT_NEEDED in capsys.readouterr().out
    face(sgd(BF16), 8.0)
    face(sgd(F16), dynamic_loss_scale=flag)
    both = sgd(BF16)
    both.add_param_group({"params": [ones(2)]})
    face(both, dynamic_loss_scale=flag)
    assert NOT_NEEDED not in capsys.readouterr().out

"""The loss-scale rule, against the rules of 2019, torch.amp.GradScaler and its twin in C++."""

import dataclasses
import itertools
import json
import math
import os
import random
import re
import shlex
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from apex_mp.loss_scale import (
    AMP_PRESET,
    FLOAT32_MAX,
    FP16_UTILS_PRESET,
    FUSED_PRESET,
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    from_dict,
    to_dict,
)

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


SMALLEST_NORMAL = 2.0**-126
CSRC = Path(__file__).parents[2] / "csrc"


def all_sequences(length: int) -> Iterator[tuple[bool, ...]]:
    """Every sequence of that length; as states are compared step by step, all shorter ones too."""
    return itertools.product([False, True], repeat=length)


def scales(loss_scale: LossScale, overflows: tuple[bool, ...]) -> list[float]:
    out = []
    for found_inf in overflows:
        loss_scale = loss_scale.update(found_inf)
        out.append(loss_scale.scale)
    return out


# The rules of 2019, each from its description, with no line in common with the package.


def amp_rule_of_2019(start: float, window: int, overflows: tuple[bool, ...]) -> list[float]:
    scale, unskipped, out = start, 0, []
    for overflow in overflows:
        if overflow:
            scale /= 2.0
            unskipped = 0
        else:
            unskipped += 1
        if unskipped == window:
            scale = min(2.0**24, scale * 2.0)
            unskipped = 0
        out.append(scale)
    return out


def modulo_rule_of_2019(start: float, window: int, overflows: tuple[bool, ...]) -> list[float]:
    """fp16_utils.DynamicLossScaler, and the lines inlined in the fused FP16_Optimizer."""
    scale, last_overflow_iter, out = start, -1, []
    for cur_iter, overflow in enumerate(overflows):
        if overflow:
            scale = max(scale / 2.0, 1)
            last_overflow_iter = cur_iter
        elif (cur_iter - last_overflow_iter) % window == 0:
            scale *= 2.0
        out.append(scale)
    return out


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("preset", "start", "rule_of_2019"),
    [
        pytest.param(AMP_PRESET, 2.0**16, amp_rule_of_2019, id="amp"),
        pytest.param(AMP_PRESET, 2.0**23, amp_rule_of_2019, id="amp-near-its-maximum"),
        pytest.param(FP16_UTILS_PRESET, 2.0**32, modulo_rule_of_2019, id="fp16_utils"),
        pytest.param(
            FP16_UTILS_PRESET, 2.0**2, modulo_rule_of_2019, id="fp16_utils-near-its-floor"
        ),
        pytest.param(FUSED_PRESET, 2.0**16, modulo_rule_of_2019, id="fused"),
        pytest.param(FUSED_PRESET, 2.0**1, modulo_rule_of_2019, id="fused-near-its-floor"),
    ],
)
def test_a_preset_walks_every_sequence_as_its_rule_of_2019(
    preset: DynamicLossScale,
    start: float,
    rule_of_2019: Callable[[float, int, tuple[bool, ...]], list[float]],
    window: int,
) -> None:
    loss_scale = dataclasses.replace(preset, scale=start, growth_interval=window)
    for overflows in all_sequences(12):
        assert scales(loss_scale, overflows) == rule_of_2019(start, window, overflows), overflows


@pytest.mark.parametrize("growth_factor", [1.0, 1.1, 2.0, 3.0, 1e30, FLOAT32_MAX])
@pytest.mark.parametrize("start", [1.0, 3.0, 2.0**127, FLOAT32_MAX])
def test_the_scale_never_grows_out_of_float32(growth_factor: float, start: float) -> None:
    loss_scale = DynamicLossScale(start, growth_factor=growth_factor, growth_interval=1)
    for _ in range(1000):
        previous, loss_scale = loss_scale, loss_scale.update(False)
        assert previous.scale <= loss_scale.scale <= FLOAT32_MAX


@pytest.mark.parametrize("min_scale", [SMALLEST_NORMAL, 2.0**-3, 0.1, 1.0])
@pytest.mark.parametrize("backoff_factor", [0.5, 0.7, 1e-30])
def test_the_scale_stops_at_its_minimum_when_overflows_do_not_end(
    min_scale: float, backoff_factor: float
) -> None:
    loss_scale = DynamicLossScale(
        2.0**16, growth_interval=1, backoff_factor=backoff_factor, min_scale=min_scale
    )
    for _ in range(1000):
        loss_scale = loss_scale.update(True)
    assert loss_scale.scale == struct.unpack("f", struct.pack("f", min_scale))[0]
    assert math.isfinite(loss_scale.inv_scale)
    assert loss_scale.update(False).scale > loss_scale.scale


def test_the_product_is_rounded_to_float32_with_ties_to_even() -> None:
    # float32 next to 1 is 1 + 2**-23; times 1.5 that lies halfway between two float32 numbers.
    loss_scale = DynamicLossScale(1.0 + 2.0**-23, growth_factor=1.5, growth_interval=1)
    assert loss_scale.update(False).scale == 1.5 + 2.0**-22
    loss_scale = dataclasses.replace(loss_scale, scale=1.0 + 3 * 2.0**-23)
    assert loss_scale.update(False).scale == 1.5 + 2.0**-21


@pytest.mark.parametrize("field", ["scale", "growth_factor", "backoff_factor", "min_scale"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, 0.0, -1.0, 10**400])
def test_a_number_out_of_range_raises_a_sentence(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^DynamicLossScale: {field} is .+; it must lie in .+$"):
        DynamicLossScale(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"scale": math.nan},
            "DynamicLossScale: scale is nan; it must lie in "
            "[1.1754943508222875e-38, 3.4028234663852886e+38]",
        ),
        (
            {"growth_factor": 0.5},
            "DynamicLossScale: growth_factor is 0.5; it must lie in [1.0, 3.4028234663852886e+38]",
        ),
        (
            {"backoff_factor": 1.0},
            "DynamicLossScale: backoff_factor is 1.0; it must lie in (0.0, 1.0)",
        ),
        (
            {"min_scale": 4.0, "max_scale": 2.0},
            "DynamicLossScale: max_scale is 2.0; it must lie in [4.0, inf]",
        ),
        (
            {"max_scale": math.nan},
            "DynamicLossScale: max_scale is nan; it must lie in [1.1754943508222875e-38, inf]",
        ),
        (
            {"growth_interval": 0},
            "DynamicLossScale: growth_interval is 0; it must lie in [1, 2147483647]",
        ),
        (
            {"growth_interval": 2**31},
            "DynamicLossScale: growth_interval is 2147483648; it must lie in [1, 2147483647]",
        ),
        ({"hysteresis": 0}, "DynamicLossScale: hysteresis is 0; it must lie in [1, 2147483647]"),
        ({"good_steps": -1}, "DynamicLossScale: good_steps is -1; it must lie in [0, 2147483647]"),
        ({"overflows": -1}, "DynamicLossScale: overflows is -1; it must lie in [0, 2147483647]"),
    ],
)
def test_a_value_error_names_field_value_and_wish(
    arguments: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DynamicLossScale(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss_scale",
    [
        NoOpLossScale(),
        StaticLossScale(128.0),
        DynamicLossScale(),
        dataclasses.replace(AMP_PRESET, scale=3.0, hysteresis=4, good_steps=7, overflows=2),
    ],
)
def test_a_loss_scale_returns_from_its_dict_of_plain_values(loss_scale: LossScale) -> None:
    values = to_dict(loss_scale)
    assert all(type(value) in (str, int, float) for value in values.values())
    assert from_dict(json.loads(json.dumps(values))) == loss_scale


class DynamicGradScaler:
    """The rule of Megatron-LM's class of this name, whose budget is renewed by a growth alone."""

    def __init__(self, scale: float, growth_interval: int, hysteresis: int) -> None:
        self.scale, self.growth_interval, self.hysteresis = scale, growth_interval, hysteresis
        self.good_steps, self.left = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.good_steps = 0
            self.left -= 1
            if self.left <= 0:
                self.scale /= 2.0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps, self.left = 0, self.hysteresis
            self.scale *= 2.0


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_is_a_budget_that_a_growth_renews(hysteresis: int) -> None:
    rng = random.Random(hysteresis)
    ours = DynamicLossScale(2.0**40, growth_interval=2, hysteresis=hysteresis)
    theirs = DynamicGradScaler(2.0**40, 2, hysteresis)
    for _ in range(500):
        found_inf = rng.random() < 0.4
        ours = ours.update(found_inf)
        theirs.update(found_inf)
        assert ours.scale == theirs.scale
    scale, exponents = DynamicLossScale(2.0**10, hysteresis=2), []
    for _ in range(4):
        scale = scale.update(True)
        exponents.append(math.log2(scale.scale))
    assert exponents == [10, 9, 8, 7]


# The twin in C++. The rule is a function of state and found_inf, so it is enough to compare one
# step from every state that some sequence reaches.

DRIVER = r"""
#include <cstdio>

#include "math/update_scale.h"

int main() {
  using namespace apex_mp::math;
  LossScaleRule rule;
  LossScaleState state;
  int found_inf;
  while (std::scanf("%lf %lf %lf %lf %d %d %f %d %d %d", &rule.growth_factor,
                    &rule.backoff_factor, &rule.min_scale, &rule.max_scale,
                    &rule.growth_interval, &rule.hysteresis, &state.scale, &state.good_steps,
                    &state.overflows, &found_inf) == 10) {
    const LossScaleState next = update_scale(state, found_inf != 0, rule);
    std::printf("%a %d %d\n", static_cast<double>(next.scale), next.good_steps, next.overflows);
  }
}
"""

Twin = Callable[[list[tuple[DynamicLossScale, bool]]], list[tuple[float, int, int]]]


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """update_scale of C++, compiled so that undefined behaviour traps."""
    folder = tmp_path_factory.mktemp("update_scale")
    (folder / "driver.cpp").write_text(DRIVER)
    subprocess.run(
        [
            *shlex.split(os.environ.get("CXX", "c++")),
            *["-std=c++17", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Werror"],
            *["-fsanitize=undefined,float-cast-overflow", "-fsanitize-undefined-trap-on-error"],
            *[f"-I{CSRC}", "driver.cpp", "-o", "driver"],
        ],
        cwd=folder,
        check=True,
    )

    def run(cases: list[tuple[DynamicLossScale, bool]]) -> list[tuple[float, int, int]]:
        lines = [
            f"{s.growth_factor.hex()} {s.backoff_factor.hex()} {s.min_scale.hex()} "
            f"{s.max_scale.hex()} {s.growth_interval} {s.hysteresis} {s.scale.hex()} "
            f"{s.good_steps} {s.overflows} {found_inf:d}"
            for s, found_inf in cases
        ]
        out = subprocess.run(
            [folder / "driver"], input="\n".join(lines), capture_output=True, text=True, check=True
        ).stdout
        words = [line.split() for line in out.splitlines()]
        return [(float.fromhex(scale), int(good), int(over)) for scale, good, over in words]

    return run


def in_python(cases: list[tuple[DynamicLossScale, bool]]) -> list[tuple[float, int, int]]:
    after = [loss_scale.update(found_inf) for loss_scale, found_inf in cases]
    return [(s.scale, s.good_steps, s.overflows) for s in after]


def reachable(start: DynamicLossScale, length: int) -> list[DynamicLossScale]:
    """Every state that a sequence of at most that length reaches."""
    seen, edge = {start}, {start}
    for _ in range(length):
        edge = {s.update(found_inf) for s in edge for found_inf in (False, True)} - seen
        seen |= edge
    return sorted(seen, key=lambda s: (s.scale, s.good_steps, s.overflows))


@pytest.mark.parametrize(
    "start",
    [
        DynamicLossScale(2.0**23, growth_interval=3, max_scale=2.0**24),
        DynamicLossScale(2.0**2, growth_interval=3, min_scale=1.0),
        DynamicLossScale(2.0**16, growth_interval=3, hysteresis=2),
        DynamicLossScale(2.0**16, growth_interval=2, growth_factor=3.0, backoff_factor=0.7),
        DynamicLossScale(1.0, growth_interval=2, growth_factor=1.1, backoff_factor=0.9),
        DynamicLossScale(2.0**125, growth_interval=1, hysteresis=3),
        DynamicLossScale(2.0**-124, growth_interval=2),
        DynamicLossScale(1.0, growth_interval=1, max_scale=1.1, min_scale=0.1, hysteresis=2),
    ],
)
def test_the_twin_in_cpp_takes_every_step_as_python_does(
    twin: Twin, start: DynamicLossScale
) -> None:
    cases = [(s, found_inf) for s in reachable(start, 12) for found_inf in (False, True)]
    assert twin(cases) == in_python(cases)


def test_the_twin_in_cpp_agrees_bit_for_bit_on_any_rule_and_any_float32_scale(twin: Twin) -> None:
    rng = random.Random(0)

    def float32(low: int = -126, high: int = 127) -> float:
        return math.ldexp(1.0 + rng.getrandbits(23) / 2.0**23, rng.randint(low, high))

    cases = []
    for _ in range(5000):
        bounds = sorted([float32(), float32()])
        interval, hysteresis = rng.randint(1, 3), rng.randint(1, 3)
        loss_scale = DynamicLossScale(
            float32(),
            growth_factor=rng.choice([2.0, 1.0, 1.0 + rng.random(), float32(0, 40)]),
            backoff_factor=rng.choice([0.5, rng.uniform(1e-9, 1.0), float32(-40, -1)]),
            min_scale=rng.choice([SMALLEST_NORMAL, bounds[0], bounds[0] * 1.0000000001]),
            max_scale=rng.choice([math.inf, bounds[1] * 1.0000000002]),
            growth_interval=interval,
            hysteresis=hysteresis,
            good_steps=rng.choice([0, 1, 2, 2**31 - 1]),
            overflows=rng.choice([0, 1, 2, 2**31 - 1]),
        )
        cases += [(loss_scale, False), (loss_scale, True)]
    assert twin(cases) == in_python(cases)


def test_inv_scale_is_the_inverse_of_scale() -> None:
    assert (NoOpLossScale().scale, NoOpLossScale().inv_scale) == (1.0, 1.0)
    assert StaticLossScale(128.0).inv_scale == 0.0078125
    assert DynamicLossScale(2.0**16).inv_scale == 2.0**-16

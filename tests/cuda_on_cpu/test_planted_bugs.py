"""Each planted bug is caught, in the expected words, by tests that pass without it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from builder import OUT, Library, build
from nets import RunNet, run
from planted_bugs import PLANTED_BUGS, PlantedBug
from planted_plan_bugs import PLANTED_PLAN_BUGS
from planted_step_bugs import PLANTED_STEP_BUGS

ALL_BUGS = {**PLANTED_BUGS, **PLANTED_STEP_BUGS, **PLANTED_PLAN_BUGS}
FAILED, ABORTED = 1, -6


@dataclasses.dataclass(frozen=True)
class RunBug:
    """A job: plant the bug, build what it touches, and run its tests."""

    name: str
    bug: PlantedBug

    def __call__(self, libraries: dict[str, Library]) -> tuple[int, str]:
        net = self.bug.short_net
        out = OUT / "bugs" / re.sub(r"\W+", "_", self.name)
        self.bug.plant(out / "csrc")
        sound = libraries[net.grid]
        spoilt = build(out, grid=net.grid, sources_root=out / "csrc", unchanged=sound)
        return run(spoilt, net, ["--exitfirst", "--every-case"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bug" not in metafunc.fixturenames:
        return
    params = [
        pytest.param(
            bug,
            marks=[
                pytest.mark.job("without the bug", RunNet(bug.short_net, ("--every-case",))),
                pytest.mark.job("with the bug", RunBug(name, bug)),
            ],
            id=name,
        )
        for name, bug in ALL_BUGS.items()
    ]
    metafunc.parametrize("bug", params)


def last_test(output: str) -> str:
    """Return the name of the test that ended a run: it failed, or a sanitizer ended it."""
    return re.findall(r"^(tests/\S+::\w+(?:\[[^\]\n]*\])?) ", output, re.M)[-1]


def test_a_planted_bug_is_caught(bug: PlantedBug, outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["with the bug"]
    assert status in (FAILED, ABORTED), output[-20000:]
    assert re.search(bug.caught_by, output), output[-20000:]
    _, sound = outcomes["without the bug"]
    assert f"{last_test(output)} PASSED" in sound, f"{last_test(output)} fails without the bug"

"""Each planted bug is caught, in the expected words, by tests that pass without it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from bugs import Bug
from builder import OUT, Library, build
from nets import RunNet, run
from planted import BUGS, plant, short_net

FAILED, ABORTED = 1, -6


@dataclasses.dataclass(frozen=True)
class RunBug:
    """A job: plant the bug, build what it touches, and run its tests."""

    name: str
    bug: Bug

    def __call__(self, libraries: dict[str, Library]) -> tuple[int, str]:
        net = short_net(self.bug)
        out = OUT / "bugs" / re.sub(r"\W+", "_", self.name)
        plant(self.bug, out / "csrc")
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
                pytest.mark.job("without the bug", RunNet(short_net(bug), ("--every-case",))),
                pytest.mark.job("with the bug", RunBug(name, bug)),
            ],
            id=name,
        )
        for name, bug in BUGS.items()
    ]
    metafunc.parametrize("bug", params)


def last_test(output: str) -> str:
    """Return the name of the test that ended a run: it failed, or a sanitizer ended it."""
    return re.findall(r"^(tests/\S+::\w+(?:\[[^\]\n]*\])?) ", output, re.M)[-1]


def test_a_planted_bug_is_caught(bug: Bug, outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["with the bug"]
    assert status in (FAILED, ABORTED), output[-20000:]
    assert re.search(bug.words, output), output[-20000:]
    _, sound = outcomes["without the bug"]
    assert f"{last_test(output)} PASSED" in sound, f"{last_test(output)} fails without the bug"

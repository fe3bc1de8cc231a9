"""Each planted bug is caught, in the expected words, by tests that pass without it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess

import pytest
from builder import OUT, ROOT, Library, build
from nets import RunNet, run
from planted_bugs import PLANTED_BUGS, PlantedBug
from planted_plan_bugs import PLANTED_PLAN_BUGS
from planted_step_bugs import PLANTED_STEP_BUGS

ALL_BUGS = {**PLANTED_BUGS, **PLANTED_STEP_BUGS, **PLANTED_PLAN_BUGS}
FAILED, ABORTED = 1, -6
NIGHTLY = ROOT / "benchmarks" / "results" / "nightly.json"
MOST = 24  # bugs of a short run; each takes about five seconds on two cores


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
    bugs = bugs_of_changed_files() if metafunc.config.getoption("short") else ALL_BUGS
    params = [
        pytest.param(
            bug,
            marks=[
                pytest.mark.job("without the bug", RunNet(bug.short_net, ("--every-case",))),
                pytest.mark.job("with the bug", RunBug(name, bug)),
            ],
            id=name,
        )
        for name, bug in bugs.items()
    ]
    metafunc.parametrize("bug", params)


def bugs_of_changed_files() -> dict[str, PlantedBug]:
    """Return the bugs of files that changed since the nightly run, `MOST` at most.

    The files give one each in turn. All have changed if git does not know the nightly commit.
    """
    commit = json.loads(NIGHTLY.read_text())["cuda-on-cpu"]["commit"]
    command = ["git", "diff", "--name-only", "--relative=csrc", commit]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    by_file: dict[str, list[str]] = {}
    for name, bug in ALL_BUGS.items():
        if diff.returncode or bug.file in diff.stdout.split():
            by_file.setdefault(bug.file, []).append(name)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_file.values()))
    return {name: ALL_BUGS[name] for name in [name for name in in_turn if name][:MOST]}


def last_test(output: str) -> str:
    """Return the name of the test that ended a run: it failed, or a sanitizer ended it."""
    return re.findall(r"^(tests/\S+::\w+(?:\[[^\]\n]*\])?) ", output, re.M)[-1]


def test_a_planted_bug_is_caught(bug: PlantedBug, outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["with the bug"]
    assert status in (FAILED, ABORTED), output[-20000:]
    assert re.search(bug.caught_by, output), output[-20000:]
    _, sound = outcomes["without the bug"]
    assert f"{last_test(output)} PASSED" in sound, f"{last_test(output)} fails without the bug"

"""Builds and runs in the background, as many at a time as there are jobs, in the tests' order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from builder import GRIDS, JOBS, OUT, Library, build

Libraries = dict[str, Library]  # csrc/ as it is, by the name of the grid
Outcome = tuple[int, str]  # exit status and output
Job = Callable[[Libraries], Outcome]


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "nets with each value of each parameter"
    parser.addoption("--short", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "job(name, function): what a test wants to have been run")


@pytest.fixture(scope="session")
def libraries() -> Libraries:
    return {grid: build(OUT / grid, grid=grid) for grid in GRIDS}


@pytest.fixture(scope="session")
def futures(
    request: pytest.FixtureRequest, libraries: Libraries
) -> Iterator[dict[Job, Future[Outcome]]]:
    """Start the jobs of all tests that were collected, each once."""
    items = request.session.items
    jobs = [mark.args[1] for item in items for mark in item.iter_markers("job")]
    with ThreadPoolExecutor(JOBS) as pool:
        yield {job: pool.submit(job, libraries) for job in dict.fromkeys(jobs)}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def outcomes(
    request: pytest.FixtureRequest, futures: dict[Job, Future[Outcome]]
) -> dict[str, Outcome]:
    """Wait for the jobs of this test, and return their outcomes by name."""
    marks = request.node.iter_markers("job")
    return {mark.args[0]: futures[mark.args[1]].result() for mark in marks}

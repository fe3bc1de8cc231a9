"""The table of mutants fits the package; `make mutants` runs tests with each of them."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "mutants"))

from table import MUTANTS, PARTS

import apex_mp

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

PACKAGE = Path(apex_mp.__file__).parent


def test_each_part_of_the_package_has_ten_mutants() -> None:
    assert len(MUTANTS) >= 60
    assert min(map(len, PARTS)) >= 10
    assert len(MUTANTS) == sum(map(len, PARTS))


def test_a_mutant_changes_text_that_is_there_once() -> None:
    counts = {
        name: (PACKAGE / mutant.file).read_text().count(mutant.before)
        for name, mutant in MUTANTS.items()
    }
    assert counts == dict.fromkeys(MUTANTS, 1)

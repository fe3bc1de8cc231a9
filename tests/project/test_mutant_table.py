"""The table of mutants fits the package; `make mutants` runs tests with each of them."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "mutants"))

from table import MUTANTS, PARTS

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


def test_each_part_of_the_package_has_ten_mutants() -> None:
    assert len(MUTANTS) >= 60
    assert min(map(len, PARTS)) >= 10
    assert len(MUTANTS) == sum(map(len, PARTS))
    assert not [name for name, mutant in MUTANTS.items() if mutant.before == mutant.after]


def test_a_mutant_changes_an_expression_that_is_there_once() -> None:
    counts = {name: len(mutant.places()) for name, mutant in MUTANTS.items()}
    assert counts == dict.fromkeys(MUTANTS, 1)


def test_a_mutant_is_code_that_differs() -> None:
    mutant = MUTANTS["a float16 loss is scaled in float16"]
    path, source = mutant.source()
    before, after = path.read_text(), "\n    return loss\n"
    assert after in source
    assert after not in before
    assert mutant.source() == (path, source)

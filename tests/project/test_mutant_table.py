"""Mutants and planted bugs fit the code; `make mutants` and `make cuda-on-cpu` run them."""

import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("mutants", "cuda_on_cpu")]

from mutant import MUTANTS, PARTS, places, planted
from planted import BUGS, place

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]


def test_each_part_of_the_package_has_ten_mutants() -> None:
    assert len(MUTANTS) >= 60
    assert min(map(len, PARTS)) >= 10
    assert len(MUTANTS) == sum(map(len, PARTS))
    assert not [name for name, mutant in MUTANTS.items() if mutant.before == mutant.after]


def test_a_mutant_changes_an_expression_that_is_there_once() -> None:
    counts = {name: len(places(mutant)) for name, mutant in MUTANTS.items()}
    assert counts == dict.fromkeys(MUTANTS, 1)


def test_a_mutant_is_code_that_differs() -> None:
    mutant = MUTANTS["a float16 loss is scaled in float16"]
    path, source = planted(mutant)
    before, after = path.read_text(), "\n    return loss\n"
    assert after in source
    assert after not in before
    assert planted(mutant) == (path, source)


def test_a_planted_bug_changes_text_of_a_file_that_is_there() -> None:
    assert len(BUGS) >= 120
    for bug in BUGS.values():
        file, _ = place(bug)
        assert file.endswith((".h", ".cu", ".cpp"))  # Else it says what is missing.

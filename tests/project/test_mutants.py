"""The table of mutants fits the package; `make mutants` runs tests with each of them."""

from pathlib import Path

import pytest
from mutants.table import (
    AMP,
    CHECKPOINTS,
    FP16_UTILS,
    MONITOR,
    MUTANTS,
    OLD_SCRIPTS,
    OPTIMIZERS,
    SCALER,
)

import apex_mp

pytestmark = [pytest.mark.any_torch, pytest.mark.cpu_only]

PACKAGE = Path(apex_mp.__file__).parent


def test_each_part_of_the_package_has_ten_mutants() -> None:
    assert len(MUTANTS) >= 60
    parts = (AMP, FP16_UTILS, OPTIMIZERS, CHECKPOINTS, SCALER, MONITOR, OLD_SCRIPTS)
    assert min(map(len, parts)) >= 10
    assert len(MUTANTS) == sum(map(len, parts))


def test_a_mutant_changes_text_that_is_there_once() -> None:
    counts = {
        name: (PACKAGE / mutant.file).read_text().count(mutant.before)
        for name, mutant in MUTANTS.items()
    }
    assert counts == dict.fromkeys(MUTANTS, 1)

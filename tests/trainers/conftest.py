"""Set before a trainer is imported: no weights, data or messages from the internet."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# For examples/trainers/, last, as in tests/conftest.py.
sys.path.append(str(Path(__file__).resolve().parents[2]))


def pytest_configure(config: pytest.Config) -> None:
    # What the trainers warn of in their own code, or to advise.
    for package in ("accelerate", "transformers", "lightning", "pytorch_lightning", "peft", "timm"):
        config.addinivalue_line("filterwarnings", f"ignore:::{package}")
    for package in ("lightning.fabric", "lightning_fabric"):
        advice = f"{package}.utilities.warnings.PossibleUserWarning"
        config.addinivalue_line("filterwarnings", f"ignore::{advice}")
    # pytest.warns gives it once more, from elsewhere.
    config.addinivalue_line("filterwarnings", "ignore:.isinstance.treespec:FutureWarning")


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    """Forget what accelerate keeps for the whole process, its precision among it."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

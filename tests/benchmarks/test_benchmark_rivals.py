"""benchmarks.rivals: what is missing is left out, and the pages quote the published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rivals, rivals_ways

pytestmark = [pytest.mark.cpu_only, pytest.mark.any_torch]

FOUND = json.loads((rivals.RESULTS / "rivals-cpu.json").read_text())
DOCS = rivals.RESULTS.parents[1] / "docs"
TORCH = {name: way for name, way in rivals_ways.WAYS.items() if way.module == "torch.optim"}


@pytest.mark.filterwarnings("ignore:GradScaler. AdamW steps:RuntimeWarning")
def test_a_run_lists_a_library_that_is_missing_and_writes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = rivals_ways.Way("no_such_library", "AdamW")
    monkeypatch.setattr(rivals, "WAYS", {**TORCH, "other": missing})
    monkeypatch.setattr(rivals, "STEPS", {})
    results = rivals.main(["--quick", f"--results={tmp_path}"])
    assert json.loads((tmp_path / "rivals-cpu.json").read_text()) == results
    assert [*results["rows"]] == [*TORCH]
    assert results["left_out"] == {
        "other": "ModuleNotFoundError: No module named 'no_such_library'"
    }
    assert "Left out: other" in rivals.page(results)


@pytest.mark.parametrize("name", FOUND["rows"])
def test_the_page_of_memory_quotes_each_way(name: str) -> None:
    row, base = FOUND["rows"][name], FOUND["rows"][rivals.BASE]
    assert all(len(losses) == 5 for losses in row["losses"].values())
    apart = [rivals.beyond(row, base, task) for task in FOUND["steps"]]
    said = " | ".join([f"{rivals.total(row):.2f}", *(f"{m:+.4f} ± {d:.4f}" for m, d in apart)])
    page = (DOCS / "memory.md").read_text()
    assert name == rivals.BASE or f" | {said} | " in page


def test_the_page_names_what_was_left_out_and_the_versions() -> None:
    section = (DOCS / "memory.md").read_text().partition("## Rivals by name")[2]
    section = section.partition("\n## ")[0]
    assert {*FOUND["left_out"]} == {"torchao CPUOffloadOptimizer", "FlashOptim FlashAdamW"}
    for package, version in FOUND["versions"].items():
        assert f"{package} {version}" in section

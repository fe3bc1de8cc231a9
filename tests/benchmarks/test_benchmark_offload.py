"""benchmarks.offload: the stand-in steps and is timed, and the table is that of the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import offload
from benchmarks.step_shapes import equal

pytestmark = pytest.mark.cpu_only


def test_a_run_writes_what_its_table_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(offload.SHAPES["cpu"], "small", equal(3, 1000))
    arguments = ["--device=cpu", "--workloads", "small", "--rounds=2", f"--results={tmp_path}"]
    results = offload.main(arguments)
    assert json.loads((tmp_path / "offload-cpu.json").read_text()) == results
    (row,) = results["rows"]
    assert [*row["ms"]] == ["CPU alone", "offload=True", "without copies"]
    assert all(ms > 0 for ms in row["ms"].values())
    assert f"{row['of_the_longer_half']:.2f} |" in capsys.readouterr().out


def test_the_published_figures_are_those_of_the_page() -> None:
    results = json.loads((offload.RESULTS / "offload-cpu.json").read_text())
    page = (offload.RESULTS.parents[1] / "docs" / "memory.md").read_text()
    for row in results["rows"]:
        assert f"{row['of_the_longer_half']:.2f}" in page
        assert f"{row['without_copies_of_CPU_alone']:.2f}" in page

"""CI runs a target again when what it depends on has changed, and names what failed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.cpu_only, pytest.mark.any_torch]

CI = Path(__file__).parents[2] / ".ci"
MAKEFILE = """
.PHONY: build test docs
build test test-slow every-case cuda-tests torch-oldest release-check mutants random-programs \\
  test-offload docs types sdist coverage:
	@echo $@ >> build/order
clients trainers recipes cuda-on-cpu cuda-link processors:
	@echo $@ >> build/order; test ! -e src/bug
	@echo "$(PYTEST_ARGS)" > build/arguments-of-$@
"""


def git(*arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *names, *arguments], check=True, capture_output=True)


@pytest.fixture
def ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, in a small repository with the targets of this one."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("ci_run", CI / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec.loader.exec_module(module)
    paths = {path for t in module.ON_BOTH_CORES + module.ON_ONE_CORE for path in t.when or ()}
    for path in sorted(paths):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "file").touch()
    (tmp_path / "src").mkdir()
    (tmp_path / ".gitignore").write_text("build\n")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "build" / "ci")
    monkeypatch.setattr(module, "NIGHTLY", tmp_path / "nightly.json")
    git("init", "-q")
    commit()
    return module


def commit() -> None:
    git("add", "-A")
    git("commit", "-qm", "x")


def run(ci: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[bool, set[str]]:
    """Return whether all passed, and which targets were run."""
    order = Path("build/order")
    order.unlink(missing_ok=True)
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    with pytest.raises(SystemExit) as exited:
        ci.main()
    return not exited.value.code, {*order.read_text().split()}


def test_without_a_nightly_result_all_but_what_is_nightly_runs(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, ran = run(ci, monkeypatch)
    names = {target.name for target in ci.ON_BOTH_CORES + ci.ON_ONE_CORE}
    assert passed
    assert ran == names - {
        "every-case",
        "cuda-tests",
        "torch-oldest",
        "release-check",
        "mutants",
        "random-programs",
        "coverage",
    }


def test_a_part_of_a_target_runs_in_ci_and_all_of_it_in_the_nightly_run(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments() -> list[str]:
        names = ("cuda-on-cpu", "recipes", "clients")
        return [Path(f"build/arguments-of-{name}").read_text().strip() for name in names]

    run(ci, monkeypatch)
    without_bugs = "--ignore=tests/cuda_on_cpu/test_planted_bugs.py"
    assert arguments() == [f"--short {without_bugs}", "-m 'not slow'", ""]
    run(ci, monkeypatch, "--nightly")
    assert arguments() == ["", "", ""]


def test_after_a_nightly_run_targets_with_paths_run_where_these_have_changed(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(ci, monkeypatch, "--nightly")[0]
    commit()
    with_paths = {"clients", "trainers", "recipes", "cuda-on-cpu", "cuda-link", "processors"}
    with_paths.add("test-offload")
    assert not run(ci, monkeypatch)[1] & with_paths
    Path("tests/cuda_on_cpu/file").write_text("changed")
    commit()
    assert run(ci, monkeypatch)[1] & with_paths == {"cuda-on-cpu"}
    Path("csrc/file").write_text("changed")
    commit()
    assert run(ci, monkeypatch)[1] & with_paths == with_paths


def test_the_nightly_result_says_what_was_run_and_for_how_long(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(ci, monkeypatch, "--nightly")
    results = json.loads(ci.NIGHTLY.read_text())
    assert [*results] == [t.name for t in ci.ON_BOTH_CORES + ci.ON_ONE_CORE]
    facts = {"passed", "seconds", "commit", "date", "processor", "trees"}
    assert all({*each} == facts for each in results.values())
    assert results["test"]["commit"] == ci.git("rev-parse", "HEAD")
    Path("Makefile").write_text("changed")
    monkeypatch.setattr(sys, "argv", ["run", "--nightly"])
    with pytest.raises(SystemExit, match="commit what has changed first"):
        ci.main()


@pytest.mark.slow
def test_a_target_that_does_not_end_is_stopped_and_has_failed(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ci, "LIMIT", 0.5)
    Path("Makefile").write_text(".PHONY: build\nbuild:\n\tsleep 60 & sleep 60\n")
    monkeypatch.setattr(sys, "argv", ["run"])
    with pytest.raises(SystemExit, match="not run"):
        ci.main()
    assert "make build: FAILED, stopped after 0.5 s" in capsys.readouterr().out

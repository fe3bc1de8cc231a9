"""`python -m apex_mp explain`, and the script that pip installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from apex_mp import __main__ as command
from apex_mp._check import explain
from apex_mp.core.log import warn

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_at_the_end_of_a_warning_prints_its_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(RuntimeWarning) as caught:
        warn("updates are lost", "updates-are-lost")
    words = str(caught[0].message).rpartition("[")[2].rstrip("]").split()
    assert words[:3] == ["python", "-m", "apex_mp"]
    monkeypatch.setattr(sys, "argv", words[2:])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("## Updates are lost\n")
    assert said.count("\n## ") == 0
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    assert said.strip() in page


def test_without_a_name_all_are_listed_and_a_wrong_one_gets_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explain.main([]) == 0
    names = capsys.readouterr().out.split()
    assert names == [*explain.sections()]
    assert len(names) > 15
    assert not [name for name, text in explain.sections().items() if "<!--" in text]
    with pytest.raises(SystemExit) as ended:
        explain.main(["lost-updates"])
    assert ended.value.code == 2
    assert "there is no such section, did you mean updates-are-lost" in capsys.readouterr().err


def test_the_installed_script_finds_imports_in_the_present_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["apex_mp", "explain"])
    monkeypatch.setattr(sys, "path", ["bin", *sys.path[1:]])
    with pytest.raises(SystemExit):
        command.console()
    assert sys.path[0] == str(tmp_path)


@pytest.mark.slow
def test_a_build_copies_the_page_beside_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    copied = (tmp_path / "apex_mp" / "troubleshooting.md").read_bytes()
    assert copied == (ROOT / "docs" / "troubleshooting.md").read_bytes()

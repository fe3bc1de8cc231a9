"""`python -m apex_mp check` names the options that the projects are run with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from apex_mp._check.report import examine


@pytest.mark.parametrize("project", ["fairseq", "onmt", "parlai"])
def test_the_options_are_those_of_the_page(project: str) -> None:
    spec = importlib.util.find_spec(project)
    assert spec is not None
    assert spec.origin is not None
    report = examine(Path(spec.origin).parent)
    assert report.options() == ["--modernize"]
    assert "torch.load of any pickle" in report.modernize
    assert report.names
    assert report.gpu
    # An encoder of 2019 that torch refuses, and that nobody asks for here.
    of_project = {"onmt": ["SRU_Compute"]}.get(project, [])
    assert [sentence.partition(":")[0] for sentence in report.unsupported] == of_project

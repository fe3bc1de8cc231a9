"""docs/clients.md shows what the tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_fairseq
import test_opennmt
import test_parlai

PAGE = Path(__file__).parents[2] / "docs/clients.md"


@pytest.mark.parametrize(
    "options",
    [
        f"{test_opennmt.MODEL} {test_opennmt.TRAINING} {test_opennmt.FUSED}",
        f"{test_parlai.COMMAND} {test_parlai.TASK} {test_parlai.MODEL} {test_parlai.TRAINING} "
        f"{test_parlai.FP16} {test_parlai.FROM_BASE}",
        f"{test_fairseq.ON_CPU} {test_fairseq.MODEL} {test_fairseq.TRAINING} --fp16",
    ],
    ids=["opennmt", "parlai", "fairseq"],
)
def test_the_commands_of_the_page_have_the_options_that_are_tested(options: str) -> None:
    missing = set(options.split()) - set(PAGE.read_text(encoding="utf-8").split())
    assert not missing


def test_the_page_names_the_versions_that_are_installed() -> None:
    pins = Path(__file__).with_name("requirements.txt").read_text(encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    for name, version in (("OpenNMT-py", "1.0.0"), ("torchtext", "0.4.0"), ("fairseq", "0.9.0")):
        assert f"{name}=={version}" in pins
        assert f"{name} {version}" in page
    for line in Path(__file__).with_name("projects.txt").read_text("utf-8").split():
        assert line.replace("==", " ") in page
    assert "parlai==1.0.0" in pins
    assert "ParlAI 1.0.0" in page

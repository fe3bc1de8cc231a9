"""Messages are records of the logger `apex_mp`, printed unless logging shows them already."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cases import FACES, INF, ones, pull

from apex_mp import amp, fp16_utils
from apex_mp.core import log

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

LOGGER = logging.getLogger("apex_mp")


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = [(each, [*each.handlers], each.level, each.propagate) for each in (LOGGER, root)]
    yield
    for each, handlers, level, propagate in before:
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


def overflow_of_fp16_optimizer(face: Any = fp16_utils.FP16_Optimizer, **options: Any) -> None:
    weight = ones(2)
    optimizer = face(torch.optim.SGD([weight], lr=0.1), 8.0, **options)
    optimizer.backward(pull((weight, INF)))
    optimizer.step()


def overflow_of_handle() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = amp.init(loss_scale=8.0, device_type="cpu")
    with handle.scale_loss(model(torch.ones(1, 1)).sum() * INF, optimizer) as scaled_loss:
        scaled_loss.backward()


def overflow_of_initialize(**options: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, loss_scale=8.0, **options)
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * INF, optimizer) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize(
    ("overflow", "first"),
    [
        (overflow_of_fp16_optimizer, "OVERFLOW! Skipping step."),
        (overflow_of_handle, "Gradient overflow, skipping update;"),
        (overflow_of_initialize, "Gradient overflow.  Skipping step,"),
    ],
)
def test_a_skipped_step_is_a_record_with_the_overflow_and_is_printed(
    overflow: Any,
    first: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    overflow()
    record: Any = caplog.records[-1]
    assert record.name.startswith("apex_mp.")
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(first)
    assert record.overflow.scale_before == record.overflow.scale_after == 8.0
    assert sum(found.inf + found.nan for found in record.overflow.report) == 2
    out, err = capsys.readouterr()
    assert out == "".join(f"{message}\n" for message in caplog.messages)
    assert err == ""


@pytest.mark.slow
def test_a_configured_root_logger_shows_each_line_once_in_its_format(tmp_path: Path) -> None:
    script = """
import logging, torch
logging.basicConfig(format="%(asctime)s|%(levelname)s|%(message)s")
from apex_mp.fp16_utils import FP16_Optimizer
FP16_Optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2).half())], lr=0.1))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert [line.split("|", 1)[1] for line in done.stderr.splitlines()] == [
        "INFO|FP16_Optimizer processing param group 0:",
        "INFO|FP16_Optimizer received torch.HalfTensor with torch.Size([2])",
    ]


@pytest.mark.parametrize("face", FACES.values(), ids=FACES.keys())
def test_nothing_is_logged_if_verbose_is_false(face: Any, caplog: pytest.LogCaptureFixture) -> None:
    overflow_of_fp16_optimizer(face, verbose=False)
    assert caplog.records == []


def lines_of_all_faces(capsys: pytest.CaptureFixture[str]) -> list[str]:
    overflow_of_fp16_optimizer()
    overflow_of_handle()
    overflow_of_initialize(verbosity=2)
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]


@pytest.mark.parametrize("by", ["environment", "group"])
def test_other_processes_than_the_first_are_silent_unless_asked(
    by: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = lines_of_all_faces(capsys)
    assert "Float->Half (linear)" in expected
    caplog.clear()
    if by == "environment":
        monkeypatch.setenv("RANK", "1")
    else:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert lines_of_all_faces(capsys) == []
    assert caplog.records == []
    LOGGER.setLevel(logging.DEBUG)
    assert lines_of_all_faces(capsys) == expected


@pytest.mark.parametrize(("rank", "warns"), [("0", True), ("1", False)])
def test_one_process_warns(rank: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log.warn("a sentence", "updates-are-lost")
    assert [str(each.message).startswith("a sentence [") for each in caught] == [True] * warns

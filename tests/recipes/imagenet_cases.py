"""The modules of examples/imagenet, and a folder of digits: fixtures of test_imagenet*.py."""

from __future__ import annotations

import importlib
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "examples" / "imagenet"
MODULES = ("common", "flags", "training", "main_amp", "main_fp16_optimizer", "compare")


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the recipe, which are forgotten afterwards: their names are common."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 digits as an image folder."""
    made = tmp_path_factory.mktemp("digits")
    runpy.run_path(str(SCRIPTS / "common.py"))["write_digits"](made, 160)
    return made


@pytest.fixture
def run(
    scripts: SimpleNamespace, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Train in this process, saving to a folder; return the rows of the table."""
    monkeypatch.chdir(tmp_path)

    def call(way: str, flags: str = "", save: str = "saved") -> Any:
        module, *given = shlex.split(f"{way} --device cpu --save {save} {flags}")
        return getattr(scripts, module).main([*given, str(folder)])

    return call

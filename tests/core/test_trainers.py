"""The modules for trainers say what they need, and cost nothing where they are not imported."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cpu_only, pytest.mark.any_torch]


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("accelerate", "accelerate"),
        ("lightning", "lightning"),
        ("pytorch_lightning", "pytorch-lightning"),
    ],
)
def test_a_missing_trainer_is_named_with_its_command(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"apex_mp.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(f"apex_mp.{module}")
    assert str(raised.value) == (
        f"apex_mp.{module} needs {module}, which is not installed: pip install {package}"
    )


def test_apex_mp_imports_no_trainer() -> None:
    names = "{'accelerate', 'transformers', 'lightning', 'pytorch_lightning', 'timm', 'peft'}"
    code = f"import sys, apex_mp; print(sorted({names} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"

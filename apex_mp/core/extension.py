"""Load the compiled extension apex_mp._C; an ImportError holds the command that fixes it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PACKAGE = Path(__file__).resolve().parents[1]


def import_torch() -> ModuleType:
    """Import torch; the ImportError holds the command that installs it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        built_for = torch_built_for()
        built = f"; this apex_mp was built for torch {built_for}" if built_for else ""
        raise ImportError(
            f"apex_mp needs PyTorch, which this Python cannot import ({error}){built}; install it "
            f"with:\n  {_torch_command(built_for)}"
        ) from error


def load() -> ModuleType:
    """Import torch and apex_mp._C, which registers the operators, and return the latter."""
    torch = import_torch()
    # Only in this folder: the import would also find the extension of an editable install.
    if not _is_built(_PACKAGE):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        hidden = [path for path in sys.path if _is_built(Path(path, "apex_mp"))]
        hides = f", which hides the one in {hidden[0]}" if hidden else ""
        instead = "start Python in another folder to use that one, or " if hidden else ""
        raise ImportError(
            f"apex_mp's extension has not been built for Python {version} (there is no apex_mp._C "
            f"in {_PACKAGE}{hides}); {instead}{build_hint()}"
        )
    built_for = torch_built_for()
    if built_for is not None:
        _check_same_torch(built_for, torch.__version__)
    try:
        extension = importlib.import_module("apex_mp._C")
    except ImportError as error:
        raise ImportError(
            f"apex_mp's extension, built for torch {built_for or 'of unknown version'}, cannot be "
            f"loaded with torch {torch.__version__} ({error}); {build_hint()}"
        ) from error
    _check_same_torch(extension.torch_version, torch.__version__)
    try:
        extension.cpu_level()
    except ValueError as error:
        raise ImportError(f"apex_mp: {error}; run:\n  unset APEX_MP_CPU_LEVEL") from error
    return extension


def _is_built(package: Path) -> bool:
    return PathFinder.find_spec("apex_mp._C", [str(package)]) is not None


def torch_built_for() -> str | None:
    """Return the version of torch that setup.py noted beside the extension, if it did.

    It is read first: an extension of another torch often fails to load, on an undefined symbol.
    """
    record = _PACKAGE / "_C.json"
    if not record.exists():
        return None
    facts: dict[str, Any] = json.loads(record.read_text())
    return str(facts["torch"])


def no_kernels(device: torch.device) -> str:
    """Return the end of a message: this build has no kernels for the device, and what helps."""
    wish = "it must be on the CPU or on a CUDA device"
    if device.type == "cuda":
        wish = build_hint("FORCE_CUDA=1 ")
    return f"is on {device}, for which this build of apex_mp has no kernels; {wish}"


def build_hint(environment: str = "") -> str:
    """Return "build it with:" and the command; `environment` is put before it, as in a shell."""
    root = _PACKAGE.parent
    in_source_tree = (root / "setup.py").exists() and (root / "csrc").is_dir()
    what = f'-e "{root}"' if in_source_tree else "--force-reinstall --no-deps ."
    where = "" if in_source_tree else " (in the source directory of apex_mp)"
    command = f'{environment}"{sys.executable}" -m pip install --no-build-isolation {what}'
    return f"build it with{where}:\n  {command}"


def _torch_command(built_for: str | None) -> str:
    """Return the command that installs the release of torch that the extension was built for."""
    wanted = f"torch=={_release(built_for)}" if built_for else "torch>=2.11"
    return f'"{sys.executable}" -m pip install "{wanted}"'


def _release(version: str) -> str:
    # 2.13.0+cpu and 2.13.0+cu130 are one release with one C++ interface.
    return version.split("+")[0]


def is_environment_report() -> bool:
    """Return whether `python -m apex_mp` is what imports the package.

    The report is needed most when the extension cannot be loaded, but Python imports the package
    before its `__main__`. While it looks for the module of `-m`, `sys.argv[0]` is "-m".
    """
    wanted = sys.orig_argv[-len(sys.argv)]  # "apex_mp", or "-mapex_mp" in one word
    return sys.argv[0] == "-m" and re.fullmatch(r"(-\w*m)?apex_mp", wanted) is not None


def _check_same_torch(built_for: str, running: str) -> None:
    if _release(built_for) != _release(running):
        raise ImportError(
            f"apex_mp's extension was built for torch {built_for}, but this is torch {running}; "
            f"{build_hint()}\nor install the torch that it was built for:\n"
            f"  {_torch_command(built_for)}"
        )

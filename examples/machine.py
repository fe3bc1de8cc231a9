"""The machine and the packages that a recipe runs with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

import apex_mp
from apex_mp import _C


def describe(device: torch.device | str) -> dict[str, Any]:
    """Return what figures depend on."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "apex_mp": apex_mp.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_level": _C.cpu_level(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def warn_if_older(**tested: str) -> None:
    """Say which of these packages are older than the versions that the recipe was tested with."""
    for name, version in tested.items():
        found = importlib.metadata.version(name)
        if TorchVersion(found) < version:
            print(
                f"{name} {found} is older than {version}, which this recipe was tested with. "
                f"If it fails: pip install -U {name}",
                file=sys.stderr,
            )

"""What a machine with a GPU is, for the JSON of gpu_check: hardware, versions, places of tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Facts = dict[str, Any]


def ask(*argv: str) -> str | None:
    """Return what a command prints, or None if it is not there or fails."""
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


PROBE = """
import json, platform, torch
facts = {"torch": torch.__version__, "cuda": torch.version.cuda,
         "python": platform.python_version(), "gpu": None}
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    facts["gpu"] = {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}",
                    "memory_bytes": gpu.total_memory,
                    "multiprocessors": gpu.multi_processor_count}
print(json.dumps(facts))
"""
SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def find_tool(name: str) -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    places = [home / "bin", home / "compute-sanitizer"]
    return shutil.which(name, path=os.pathsep.join(map(str, places))) or shutil.which(name)


def nvidia_smi() -> dict[str, str] | None:
    said = ask("nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader")
    if not said:
        return None
    return dict(zip(SMI_FIELDS, said.splitlines()[0].split(", "), strict=False))


def last_words(text: str | None, pattern: str) -> str | None:
    found = re.search(pattern, text or "")
    return found[1] if found else None


def versions(probe: Facts, commit: str | None) -> Facts:
    nvcc, sanitizer = find_tool("nvcc"), find_tool("compute-sanitizer")
    changes = None if commit else ask("git", "status", "--porcelain")
    package = (ROOT / "apex_mp" / "_version.py").read_text()
    return {
        "torch": probe["torch"],
        "cuda_of_torch": probe["cuda"],
        "nvcc": last_words(ask(nvcc, "--version") if nvcc else None, r"release ([\d.]+)"),
        "compute_sanitizer": last_words(
            ask(sanitizer, "--version") if sanitizer else None, r"Version ([\d.]+)"
        ),
        "python": probe["python"],
        "apex_mp": last_words(package, r'__version__ = "(.+)"'),
        "commit": commit or ask("git", "rev-parse", "HEAD"),
        "changed_since_commit": None if changes is None else changes != "",
    }

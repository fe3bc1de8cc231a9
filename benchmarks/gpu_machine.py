"""What a machine with a GPU is, for the JSON of gpu_check: hardware, versions, places of tools."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PREPARED = ROOT / "build" / "gpu"  # what gpu_build makes for a machine that cannot build
Facts = dict[str, Any]

# In a process of its own, which frees the GPU when it ends.
PROBE = """
import json, platform, torch
facts = {"torch": torch.__version__, "cuda_of_torch": torch.version.cuda,
         "python": platform.python_version(), "gpu": None}
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    facts["gpu"] = {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}",
                    "memory_bytes": gpu.total_memory,
                    "multiprocessors": gpu.multi_processor_count}
print(json.dumps(facts))
"""
SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def ask(*argv: str) -> str | None:
    """Return what a command prints, or None if it is not there or fails."""
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def probe() -> Facts:
    """Return versions and the GPU, None if torch sees none; {} if there is no torch."""
    said = ask(sys.executable, "-W", "ignore", "-c", PROBE)
    return json.loads(said.splitlines()[-1]) if said else {}


def find_tool(name: str) -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    places = [home / "bin", home / "compute-sanitizer"]
    return shutil.which(name, path=os.pathsep.join(map(str, places))) or shutil.which(name)


def nvidia_smi() -> dict[str, str] | None:
    said = ask("nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader")
    if not said:
        return None
    return dict(zip(SMI_FIELDS, said.splitlines()[0].split(", "), strict=False))


def version_of(tool: str) -> str | None:
    path = find_tool(tool)
    found = re.search(r"(?:release|Version) ([\d.]+)", (path and ask(path, "--version")) or "")
    return found[1] if found else None


def commit() -> str | None:
    """Return the commit, with "-dirty" if files differ; without git, the prebuilt extension's."""
    if said := ask("git", "describe", "--always", "--dirty", "--abbrev=40"):
        return said
    record = PREPARED / "_C.json"
    return json.loads(record.read_text())["commit"] if record.exists() else None

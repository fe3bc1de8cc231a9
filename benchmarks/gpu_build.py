"""The extension for a GPU that another machine has, with variants and bugs in copies of it.

    python -m benchmarks.gpu_build --prepare    build them into build/gpu.tar.xz; no GPU is needed
    python -m benchmarks.gpu_build              unpack it and put its extension into apex_mp/, or,
                                                if it is not for this machine, build it there

The Python that runs this is the one that is built for, as is its torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_bugs import BUGS, Change

ROOT = Path(__file__).resolve().parents[1]
ARCHIVE = ROOT / "build" / "gpu.tar.xz"  # what is copied to the machine with the GPU
PREPARED = ROOT / "build" / "gpu"  # what is in it
WORK = ROOT / "build" / "gpu-prepare"  # intermediate files
PLACE = Path("apex_mp", f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
RECIPE = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "apex_mp/_version.py")

# What only a GPU can show to be better, for python -m benchmarks.step --extensions.
TUNED = "csrc/cuda/variants.h"
VARIANTS = {
    "one-vector": Change(TUNED, "APEX_MP_VECTORS 2\n", "APEX_MP_VECTORS 1\n"),
    "two-read-vectors": Change(TUNED, "APEX_MP_READ_VECTORS 4\n", "APEX_MP_READ_VECTORS 2\n"),
    "small-chunks": Change(TUNED, "APEX_MP_CHUNK_SIZE 16384\n", "APEX_MP_CHUNK_SIZE 2048\n"),
    "five-blocks": Change(TUNED, "APEX_MP_BLOCKS 4\n", "APEX_MP_BLOCKS 5\n"),
    "streamed-state": Change(TUNED, "APEX_MP_STREAM_STATE 0\n", "APEX_MP_STREAM_STATE 1\n"),
}
FOLDERS: dict[str, Mapping[str, Change]] = {"bugs": BUGS, "variants": VARIANTS}


def ask(*argv: str) -> str | None:
    """Return what a command prints, or None if it is not there or fails."""
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str | None:
    """Return the commit, with "-dirty" if files differ; without git, the prebuilt extension's."""
    if said := ask("git", "describe", "--always", "--dirty", "--abbrev=40"):
        return said
    record = PREPARED / "_C.json"
    return json.loads(record.read_text())["commit"] if record.exists() else None


def sources() -> dict[str, bytes]:
    """Return what the extension is built from."""
    paths = [ROOT / name for name in RECIPE]
    paths += sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}


def facts() -> dict[str, str]:
    """Return what must be the same where an extension is built and where it is used."""
    digest = hashlib.sha256()
    for name, content in sources().items():
        if name.startswith(("csrc/", "setup.py")):
            digest.update(name.encode() + content)
    return {"torch": torch.__version__, "file": PLACE.name, "sources": digest.hexdigest()[:16]}


def build(folder: Path, change: Change | None = None) -> None:
    """Build from a copy of the sources with a change; only files that it affects are compiled."""
    copy, start = WORK / "source", time.monotonic()
    wanted = sources()
    if change is not None:
        wanted[change.file] = change.plant(wanted[change.file].decode()).encode()
    for path in copy.rglob("*"):
        if path.is_file() and str(path.relative_to(copy)) not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = copy / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    folders = [f"--build-lib={WORK / 'lib'}", f"--build-temp={WORK / 'objects'}"]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        cwd=copy,
        env={**os.environ, "FORCE_CUDA": "1", "LDFLAGS": "-s"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nmake gpu-prepare: {folder.name} cannot be built")
    (folder / "apex_mp").mkdir(parents=True)
    shutil.copy(WORK / "lib" / PLACE, folder / PLACE)
    print(f"{folder.relative_to(ROOT)}: {time.monotonic() - start:.0f} s", flush=True)


def prepare() -> None:
    """Empty PREPARED, build into it, and pack it."""
    shutil.rmtree(PREPARED, ignore_errors=True)
    build(PREPARED)
    for kind, changes in FOLDERS.items():
        for slug, change in changes.items():
            build(PREPARED / kind / slug, change)
    record: dict[str, Any] = {**facts(), "archs": os.environ["TORCH_CUDA_ARCH_LIST"].split(";")}
    record["commit"] = ask("git", "describe", "--always", "--dirty", "--abbrev=40")
    (PREPARED / "_C.json").write_text(json.dumps(record, indent=1) + "\n")
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        archive.add(PREPARED, arcname=PREPARED.name)
    print(f"{ARCHIVE.relative_to(ROOT)}: {ARCHIVE.stat().st_size / 2**20:.1f} MiB")


def obstacle(capability: str) -> str:
    """Return why the extension of PREPARED cannot be used here, or an empty string."""
    record = PREPARED / "_C.json"
    if not record.exists():
        return "none was made (make gpu-prepare)"
    there = json.loads(record.read_text())
    for what, here in facts().items():
        if there[what] != here:
            return f"it has {what} {there[what]}, and here it is {here}"
    if capability not in there["archs"]:
        return f"it is for {there['archs']}, and this GPU is {capability}"
    return ""


def take() -> None:
    """Put the extension into apex_mp/, and the package around each of the others."""
    for path in (PREPARED / PLACE, PREPARED / "_C.json"):
        shutil.copy(path, ROOT / "apex_mp" / path.name)
    for kind, changes in FOLDERS.items():
        for folder in [PREPARED / kind / slug for slug in changes]:
            left_out = shutil.ignore_patterns("_C.*.so", "__pycache__")
            there = folder / "apex_mp"
            shutil.copytree(ROOT / "apex_mp", there, ignore=left_out, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--prepare", action="store_true", help="for another machine")
    if parser.parse_args().prepare:
        prepare()
        return
    if ARCHIVE.exists():
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(PREPARED.parent, filter="data")
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    capability = "{}.{}".format(*here)
    if why_not := obstacle(capability):
        print(f"No prebuilt extension is taken: {why_not}", flush=True)
        cuda = "1" if torch.version.cuda else "0"
        environment = {"FORCE_CUDA": cuda, "TORCH_CUDA_ARCH_LIST": capability, **os.environ}
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)
    take()
    print(f"Taken: {(PREPARED / PLACE).relative_to(ROOT)}")


if __name__ == "__main__":
    main()

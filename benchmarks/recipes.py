"""Run the commands on the pages of docs/recipes/, and keep their output for the site.

    python -m benchmarks.recipes                all pages
    python -m benchmarks.recipes bert dcgan     these

Such a block of a page holds a command; the site shows below it what it printed to stdout:

    ```console
    $ python examples/bert/bert.py --amp O1
    ```

The output is kept in benchmarks/results/recipes/, with the machine that it comes from.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.amp import environment

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "recipes"
RESULTS = ROOT / "benchmarks" / "results" / "recipes"
BLOCK = re.compile(r"```console\n\$ (.*)\n```\n")


def commands(page: str) -> list[str]:
    """Return the commands of a page."""
    return BLOCK.findall(page)


def with_outputs(name: str, page: str) -> str:
    """Return the text of a page with what its commands printed."""
    if not commands(page):
        return page
    printed = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["blocks"]
    outputs = {each["command"]: each["output"] for each in printed}
    return BLOCK.sub(lambda found: f"```console\n$ {found[1]}\n{outputs[found[1]]}```\n", page)


def run(command: str) -> str:
    """Run a command in the root of the sources with this Python, and return its stdout.

    Raises:
        SystemExit: The command fails.
    """
    program, *arguments = shlex.split(command)
    if program != "python":
        sys.exit(f"{command}: the command must begin with python")
    print(f"$ {command}", flush=True)
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(f"{command}: failed with exit status {ended.returncode}")
    return "\n".join(line.rstrip() for line in ended.stdout.splitlines()) + "\n"


def renew(name: str) -> None:
    """Run the commands of a page, and write their output to its file of results."""
    page = (PAGES / f"{name}.md").read_text()
    ran = [{"command": command, "output": run(command)} for command in commands(page)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = {"environment": environment(device), "blocks": ran}
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")


def main() -> None:
    names = sorted(path.stem for path in PAGES.glob("*.md"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(names)} [all]")
    wanted = parser.parse_args().pages
    unknown = {*wanted} - {*names}
    if unknown:
        parser.error(f"no page {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    for name in wanted or names:
        renew(name)


if __name__ == "__main__":
    main()

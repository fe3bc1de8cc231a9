"""Compares this tree with an earlier commit: random programs must do the same in both.

    make compare BASE=81c2a31
    python tests/comparison/compare.py --base 81c2a31 --programs 300 --seed 0

The earlier commit is built below build/comparison/. Each program runs in both builds, each in a
process of its own; the first statement that does otherwise is reported, with the program cut down
to what still shows it. Every fifth program is a fixture: the old build alone trains and saves, and
both builds load that file and go on. Exits with 1 if there is a difference that is not INTENDED.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import program

ROOT = Path(__file__).resolve().parent.parent.parent
RUNNER = Path(__file__).with_name("runner.py")
TIME_LIMIT = 60.0  # seconds for a program, which takes 0.05

# Messages that are changed on purpose: a pattern for the old one, and what replaces it in the new
# one, as in re.sub. Empty the table when BASE has the change.
INTENDED: list[tuple[str, str]] = []

Trace = list[dict[str, Any]]
# What is compared of each statement, the worst first.
ASPECTS = {
    "died": "the process",
    "error": "exception",
    "value": "value",
    "changes": "state",
    "message": "message",
    "warnings": "warnings",
    "printed": "printed",
}
TEXTS = ("message", "warnings", "printed")


class Build:
    """A process that runs programs on one build of apex_mp.

    Args:
        folder: Holds `apex_mp`, built.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None

    def start(self, lines: list[str]) -> None:
        """Begin to run a program; `finish` returns its trace."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._begin()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(lines) + "\n")
        self._process.stdin.flush()

    def finish(self) -> Trace:
        """Return the trace; of a process that died or hung, one entry that says so."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        timer = threading.Timer(TIME_LIMIT, process.kill)
        timer.start()
        answer = process.stdout.readline()
        timer.cancel()
        if answer:
            trace: Trace = json.loads(answer)
            return trace
        self._process = None
        return [{"line": "the program", "died": f"exit code {process.wait()}"}]

    def _begin(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(self.folder),
                "PYTHONHASHSEED": "0",
                "OMP_NUM_THREADS": "1",
            },
        )
        assert process.stdout is not None
        where = Path(json.loads(process.stdout.readline() or '""'))
        if where.parent.parent.resolve() != self.folder.resolve():
            sys.exit(f"{self.folder} holds no apex_mp that can be imported: {where} came instead")
        return process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclasses.dataclass
class Difference:
    """Where two traces part.

    Attributes:
        aspect: One of ASPECTS.
        number: Of the statement.
        line: The statement.
        old, new: What it did.
    """

    aspect: str
    number: int
    line: str
    old: Any
    new: Any

    def kind(self) -> tuple[str, ...]:
        """What differences have in common that probably have one reason."""
        if self.aspect in ("value", "changes"):
            names = {re.sub(r"\d+", "N", name) for name in {**self.old, **self.new}}
            statement = re.sub(r"[\d.]+(e[-+]?\d+)?", "N", self.line)
            return self.aspect, statement, *sorted(names)
        return self.aspect, *(
            re.sub(r"\d+|\[.*\]", "N", str(each)) for each in (self.old, self.new)
        )


def first_difference(old: Trace, new: Trace) -> Difference | None:
    """Return the first difference that is no text; else the first text that is not INTENDED."""
    text = None
    if "died" in old[0] or "died" in new[0]:  # Equal deaths show nothing.
        return Difference(
            "died", 0, "the program", *(t[0].get("died", "ended") for t in (old, new))
        )
    for number, (before, after) in enumerate(zip(old, new, strict=False)):
        for aspect in ASPECTS:
            one, other = before.get(aspect), after.get(aspect)
            if one == other or (aspect in TEXTS and is_intended(one, other)):
                continue
            if aspect in ("value", "changes"):
                one, other = only_different(one, other)
            if aspect == "error":
                one, other = raised(before), raised(after)
            found = Difference(aspect, number, after["line"], one, other)
            if aspect not in TEXTS:
                return found
            text = text or found
    return text


def is_intended(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(is_intended, old, new))
    return old == new or any(re.sub(pattern, by, str(old)) == new for pattern, by in INTENDED)


def only_different(old: Any, new: Any) -> tuple[dict[str, str], dict[str, str]]:
    old, new = (each if isinstance(each, dict) else {"it": each} for each in (old, new))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {n: old.get(n, "-") for n in names}, {n: new.get(n, "-") for n in names}


def raised(done: dict[str, Any]) -> str:
    return f"{done['error']}: {done['message']}" if "error" in done else "no exception"


def show(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"\n      {name}: {each}" for name, each in [*value.items()][:6])
    return str(value)


Compare = Callable[[list[str]], "Difference | None"]


def cut_down(lines: list[str], found: Difference, compare: Compare) -> tuple[list[str], Difference]:
    """Leave statements out as long as the same difference remains."""
    lines = lines[: found.number + 1] if found.aspect != "died" else lines
    size = max(1, len(lines) // 2)
    while size:
        start = 0
        while start < len(lines):
            shorter = lines[:start] + lines[start + size :]
            other = compare(shorter) if shorter else None
            if other is not None and other.kind() == found.kind():
                lines, found = shorter, other
            else:
                start += size
        size //= 2
    return lines, found


def folder_of(base: str) -> Path:
    """Return a folder with a build of a commit, made if need be; a folder is returned as it is."""
    if Path(base).is_dir():
        return Path(base)
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", f"{base}^{{commit}}"], text=True).strip()
    folder = ROOT / "build" / "comparison" / commit
    if not [*folder.glob("apex_mp/_C.*.so")]:
        print(f"Building {commit[:12]} in {folder}: some minutes", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run([*git, "archive", commit], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        environment = {**os.environ, "FORCE_CUDA": "0"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}{commit} cannot be built")
    return folder


def report(seeds: list[int], lines: list[str], found: Difference) -> None:
    others = f" and {len(seeds) - 1} more like it: {seeds[1:10]}" if len(seeds) > 1 else ""
    print(f"\nseed {seeds[0]}{others}: {ASPECTS[found.aspect]} differs")
    for number, line in enumerate(lines):
        print(f"  {'->' if number == found.number else '  '} {line}")
    print(f"    old: {show(found.old)}\n    new: {show(found.new)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", required=True, help="a commit, or a folder that holds a build")
    parser.add_argument("--tree", default=str(ROOT), help="the new build [this tree]")
    parser.add_argument("--programs", type=int, default=300, help="how many [300]")
    parser.add_argument("--seed", type=int, default=0, help="of the first program [0]")
    arguments = parser.parse_args()
    old, new = Build(folder_of(arguments.base)), Build(Path(arguments.tree))

    def compare(lines: list[str]) -> Difference | None:
        for build in (old, new):
            build.start(lines)
        return first_difference(old.finish(), new.finish())

    kinds: dict[tuple[str, ...], tuple[list[int], list[str], Difference]] = {}
    with tempfile.TemporaryDirectory() as files:
        for seed in range(arguments.seed, arguments.seed + arguments.programs):
            lines = program.write(seed)
            if seed % 5 == 4:
                first, lines = program.write_fixture(seed, f"{files}/{seed}.pt")
                old.start(first)
                old.finish()
            found = compare(lines)
            if found is None:
                continue
            kinds.setdefault(found.kind(), ([], lines, found))[0].append(seed)
        for seeds, lines, found in kinds.values():
            report(seeds, *cut_down(lines, found, compare))
        old.close()
        new.close()
    number = sum(len(seeds) for seeds, _, _ in kinds.values())
    print(f"{arguments.programs} programs: {number} differ, in {len(kinds)} ways")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())

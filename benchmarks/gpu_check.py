"""Build, test and measure on a GPU in two parts of four minutes at most: `make gpu`.

    python -m benchmarks.gpu_check --part 1     what is not timed, side by side
    python -m benchmarks.gpu_check --part 2     what is timed, one after another
    python -m benchmarks.gpu_check --stages 'memcheck recipe-bert'

A part ends after four minutes; stages that have not begun then are "not reached". The JSON and the
archive, of logs and of all results, are written again after each stage, so a run that is killed
leaves the results of those before. Nothing is installed or fetched.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_build import ROOT, ask, commit
from benchmarks.gpu_stages import Stage, stages

LOGS = ROOT / "build" / "gpu-check"
SHOWN = 20  # lines of a stage that failed


def run(stage: Stage, limit: float) -> dict[str, Any]:
    """Run a stage for `limit` seconds at most, with its output in a log; return what to record."""
    facts: dict[str, Any] = {"command": shlex.join(stage.argv)}
    absent = stage.needs is not None and not stage.needs.exists()
    if missing := stage.missing or ("not built (make gpu-prepare)" if absent else ""):
        return {**facts, "outcome": "missing", "found": missing}
    log, start = LOGS / f"{stage.name}.log", time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            stage.argv,
            cwd=stage.folder,
            env={**os.environ, **stage.environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # to be stopped with its children
        )
        try:
            status: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    output = log.read_text(errors="replace")
    facts.update(seconds=round(time.monotonic() - start, 1), status=status)
    try:
        if status is None:
            raise ValueError(f"stopped after {limit:.0f} seconds")
        return {**facts, "outcome": "passed", "found": stage.judge(status, output)}
    except ValueError as error:
        failed = re.findall(r"^(?:\[gw\d+\].*)?\b(?:FAILED|ERROR)\b.*", output, re.MULTILINE)
        failed = failed[:SHOWN]
        tail = output.splitlines()[-SHOWN:]
        return {**facts, "outcome": "failed", "found": str(error), "failed": failed, "tail": tail}


class Record:
    """The JSON and the archive of logs, which are replaced as a whole at each change."""

    def __init__(self, path: Path, facts: dict[str, Any], asked: Sequence[Stage]) -> None:
        self.path, self.facts, self._lock = path, facts, threading.Lock()
        self._start = time.time()
        self.stages: dict[str, dict[str, Any]] = {
            stage.name: {"outcome": "not reached", "found": ""} for stage in asked
        }

    @property
    def passed(self) -> bool:
        return all(each["outcome"] == "passed" for each in self.stages.values())

    def set(self, name: str, facts: dict[str, Any]) -> None:
        """Record a stage, and say how it ended."""
        with self._lock:
            self.stages[name] = facts
            print(self.row(name), *facts.get("tail", ()), sep="\n  ", flush=True)
            whole = {**self.facts, "passed": self.passed, "stages": self.stages}
            text = (
                json.dumps(whole, indent=1)
                .replace(str(ROOT), ".")
                .replace(sys.executable, "python")
            )
            draft = self.path.with_suffix(".part")
            draft.write_text(text + "\n")
            draft.replace(self.path)
            with tarfile.open(draft, "w:gz") as archive:
                for path in [*sorted(LOGS.glob("*.log")), *self._results()]:
                    archive.add(path, arcname=f"{self.path.stem}/{path.name}")
            draft.replace(self.path.with_suffix(".tar.gz"))

    def _results(self) -> list[Path]:
        """Return the files that stages have written: the archive is all there is to copy."""
        files = (p for p in sorted(self.path.parent.iterdir()) if p.suffix in {".json", ".png"})
        return [path for path in files if path.stat().st_mtime >= self._start]

    def row(self, name: str) -> str:
        facts = self.stages[name]
        seconds = f"{facts['seconds']:.0f} s" if "seconds" in facts else ""
        return f"{name:<45} {facts['outcome']:<12} {seconds:>6} {facts['found']}".rstrip()


def run_stages(asked: Sequence[Stage], record: Record, seconds: float) -> None:
    """Run part 0, then part 1 side by side, then part 2 alone; begin nothing after `seconds`."""
    end = time.monotonic() + seconds

    def take(stage: Stage) -> bool:
        left = end - time.monotonic()
        if left > 0:
            record.set(stage.name, run(stage, min(stage.limit, left)))
        return record.stages[stage.name]["outcome"] == "passed"

    if not all(take(stage) for stage in asked if stage.part == 0):
        return  # The others mean nothing without the extension.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        list(pool.map(take, [stage for stage in asked if stage.part == 1]))
    for stage in asked:
        if stage.part == 2:
            take(stage)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", type=int, choices=[1, 2], help="of the stages [both]")
    parser.add_argument("--stages", default="", help="those whose names begin so")
    parser.add_argument("--seconds", type=float, help="for all stages [240 for each part]")
    parser.add_argument("--results", type=Path, help="a folder [benchmarks/results]")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse")
    args = parser.parse_args(argv)
    args.seconds = args.seconds or (480.0 if args.part is None else 240.0)
    return args


def choose(every: Sequence[Stage], args: argparse.Namespace) -> list[Stage]:
    """Return the stages that were asked for.

    Raises:
        SystemExit: No stage begins with one of the names.
    """
    names = args.stages.split()
    for name in names:
        if not any(stage.name.startswith(name) for stage in every):
            known = ", ".join(stage.name for stage in every)
            sys.exit(f"gpu_check: no stage begins with {name!r}; there are: {known}")
    if names:
        return [stage for stage in every if stage.name.startswith(tuple(names))]
    return [stage for stage in every if args.part is None or stage.part in (0, args.part)]


def machine(device: str) -> dict[str, Any]:
    """Return what the results depend on; apex_mp may not be built yet, and is not imported."""
    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    facts |= {"gpu": "rehearsal", "cores": os.cpu_count()}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts |= {"gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}"}
        facts |= {"memory_bytes": gpu.total_memory, "multiprocessors": gpu.multi_processor_count}
        query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        facts["nvidia_smi"] = ask("nvidia-smi", query, "--format=csv")
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"gpu_check: torch {torch.__version__} sees no GPU; it must see one (--device cpu "
            "rehearses all stages without)"
        )
    default = ROOT / ("benchmarks/results" if args.device == "cuda" else "build/rehearsal")
    results = (args.results or default).absolute()
    for folder in (results, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    for log in LOGS.glob("*.log"):
        log.unlink()
    asked = choose(stages(args.device, results, LOGS), args)
    date = datetime.datetime.now(datetime.timezone.utc)
    facts = machine(args.device)
    slug = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
    record = Record(
        results / f"gpu-check-{slug}-{date:%Y%m%d-%H%M%S}.json",
        {"date": f"{date:%Y-%m-%dT%H:%M:%SZ}", "commit": commit(), "machine": facts},
        asked,
    )
    run_stages(asked, record, args.seconds)
    print(*map(record.row, record.stages), record.path, sep="\n")
    return 0 if record.passed else 1


if __name__ == "__main__":
    sys.exit(main())

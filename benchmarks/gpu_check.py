"""`make gpu`: build for the GPU of this machine, test on it, and write what came out as JSON.

Each stage (`gpu_stages.STAGES`) has a time limit. The JSON is written before and after each, so a
run that is killed leaves what it knew. Nothing is installed and nothing is fetched.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu_machine import PROBE, ROOT, Facts, ask, find_tool, nvidia_smi, versions
from benchmarks.gpu_stages import SHOWN, STAGES, Command, Machine, Run, Stage, read_lines

# Outcomes. Only the first is a success.
PASSED, FAILED, TIMED_OUT, MISSING = "passed", "failed", "timed out", "missing"
NOT_ASKED, NOT_REACHED, RUNNING, INTERRUPTED = "not asked", "not reached", "running", "interrupted"


def run_stage(stage: Stage, command: Command, machine: Machine, limit: float) -> Facts:
    """Run a stage's command for `limit` seconds at most, and return what to record."""
    if command.argv is None:
        return {"outcome": MISSING}
    log = machine.logs / f"{stage.name}.log"
    machine.lines(stage.name).unlink(missing_ok=True)
    start = time.monotonic()
    status = run_into(log, command, limit)
    seconds = round(time.monotonic() - start, 1)
    output = log.read_text(errors="replace")
    passed, facts = stage.judge(Run(status, output, machine.lines(stage.name)))
    outcome = TIMED_OUT if status is None else PASSED if passed else FAILED
    facts = {"outcome": outcome, "seconds": seconds, "status": status, **facts}
    if outcome != PASSED:
        facts["tail"] = output.splitlines()[-2 * SHOWN :]
    return facts


def run_into(log: Path, command: Command, limit: float) -> int | None:
    """Run a command with its output in `log`; return its status, None if it met the limit."""
    assert command.argv is not None
    with log.open("w") as out:
        process = subprocess.Popen(
            command.argv,
            cwd=ROOT,
            env={**os.environ, **command.environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=os.setpgrp,  # one group, to be stopped with its children
        )
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Record:
    """The JSON file: written anew at every change, never half."""

    def __init__(self, path: Path, facts: Facts, asked: Sequence[str]) -> None:
        self.path, self.facts = path, facts
        self.stages: dict[str, Facts] = {
            stage.name: {"outcome": NOT_REACHED if stage.name in asked else NOT_ASKED}
            for stage in STAGES
        }

    @property
    def passed(self) -> bool:
        return all(each["outcome"] in (PASSED, NOT_ASKED) for each in self.stages.values())

    def set(self, stage: str, **facts: Any) -> None:
        self.stages[stage].update(facts)
        self.write()

    def write(self) -> None:
        text = json.dumps({**self.facts, "passed": self.passed, "stages": self.stages}, indent=1)
        draft = self.path.with_suffix(".part")
        draft.write_text(text + "\n")
        draft.replace(self.path)

    def table(self) -> str:
        rows = [f"{'stage':<11}{'outcome':<13}{'seconds':>8}"]
        for name, facts in self.stages.items():
            seconds = f"{facts['seconds']:.1f}" if "seconds" in facts else ""
            rows.append(f"{name:<11}{facts['outcome']:<13}{seconds:>8}  {remarks(facts)}".rstrip())
        return "\n".join(rows)


def remarks(facts: Facts) -> str:
    said = [f"{count} {what.replace('_', ' ')}" for what, count in facts.get("counts", {}).items()]
    said = [each for each in said if not each.startswith("0 ")]
    if facts.get("sanitizer_errors") is not None:
        said.append(f"errors found by the sanitizer: {facts['sanitizer_errors']}")
    if facts["outcome"] == MISSING:
        said.append(facts["note"])
    return ", ".join(said)


def run_stages(machine: Machine, record: Record, asked: Sequence[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    for stage in STAGES:
        left = end - time.monotonic()
        if stage.name not in asked or left <= 0:
            continue
        command, limit = stage.command(machine), min(stage.limit, left)
        record.set(
            stage.name,
            outcome=RUNNING,
            limit_seconds=round(limit),
            command=shlex.join(command.argv or []),
            environment=command.environment,
            note=command.note,
        )
        print(f"make gpu: {stage.name}, {limit:.0f} seconds at most", flush=True)
        try:
            record.set(stage.name, **run_stage(stage, command, machine, limit))
        except BaseException:  # Ctrl-C, or SIGTERM
            record.set(stage.name, outcome=INTERRUPTED, **read_lines(machine.lines(stage.name)))
            raise
        show_failure(record.stages[stage.name])
        if stage.ends_all and record.stages[stage.name]["outcome"] != PASSED:
            return


def show_failure(facts: Facts) -> None:
    if facts["outcome"] != PASSED:
        print("\n".join(facts.get("tail", [])))
    reasons: dict[str, list[str]] = {}
    for name, reason in facts.get("not_run", {}).items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        print(f"not run: {', '.join(names[:SHOWN])}{more}: {reason}")


def result_path(folder: Path, gpu: str, date: datetime.datetime) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return folder / f"gpu-check-{slug}-{date:%Y%m%d-%H%M%S}.json"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    names = " ".join(stage.name for stage in STAGES)
    parser.add_argument("--stages", default="", help=f"some of: {names} (all)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/gpu-check")
    parser.add_argument("--python", default=sys.executable, help="the Python whose torch is meant")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all stages")
    parser.add_argument("--commit", default="", help="where git cannot tell it")
    parser.add_argument("--pytest-args", default="", help="for the stage tests")
    args = parser.parse_args(argv)
    args.stages = args.stages.split() or names.split()
    for name in args.stages:
        if name not in names.split():
            parser.error(f"--stages: {name!r} is no stage; it must be one of: {names}")
    return args


def stop(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    said = ask(args.python, "-c", PROBE)
    if not said:
        print(f'make gpu: "{args.python}" cannot import torch; set PYTHON to one that can')
        return 1
    probe = json.loads(said.splitlines()[-1])
    if probe["gpu"] is None:
        print(f'make gpu: the torch of "{args.python}" sees no GPU')
        return 1
    signal.signal(signal.SIGTERM, stop)
    for folder in (args.results, args.logs):
        folder.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.timezone.utc)
    facts = {
        "what": "make gpu",
        "date": f"{date:%Y-%m-%dT%H:%M:%SZ}",
        "hardware": {**probe["gpu"], "nvidia_smi": nvidia_smi(), "cores": os.cpu_count()},
        "versions": versions(probe, args.commit or None),
    }
    record = Record(result_path(args.results, probe["gpu"]["name"], date), facts, args.stages)
    machine = Machine(
        python=args.python,
        capability=probe["gpu"]["capability"],
        sanitizer=find_tool("compute-sanitizer"),
        logs=args.logs.absolute(),
        pytest_args=shlex.split(args.pytest_args),
    )
    run_stages(machine, record, args.stages, args.seconds)
    print(f"{record.table()}\n{record.path}")
    return 0 if record.passed else 1


if __name__ == "__main__":
    sys.exit(main())

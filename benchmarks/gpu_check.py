"""`make gpu`: build, test, measure and sanitize on this machine's GPU, and write what came out.

Each stage (`gpu_stages.stages`) has a time limit. The JSON and the archive of logs are written
again after each, so a run that is killed leaves the results of those before. Nothing is installed
or fetched.
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
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_machine import PREPARED, ROOT, Facts, commit, nvidia_smi, probe, version_of
from benchmarks.gpu_stages import SHOWN, Stage, judge, stages

LOGS = ROOT / "build" / "gpu-check"
# Outcomes. Only the first is a success.
PASSED, FAILED, TIMED_OUT, MISSING = "passed", "failed", "timed out", "missing"
NOT_ASKED, NOT_REACHED, RUNNING = "not asked", "not reached", "running"


def run_stage(stage: Stage, limit: float) -> Facts:
    """Run a stage for `limit` seconds at most, and return what to record."""
    if stage.argv is None:
        return {"outcome": MISSING}
    if stage.prepared and not list(PREPARED.glob(f"{stage.prepared}/*/apex_mp/__init__.py")):
        missing = f"build/gpu/{stage.prepared} has nothing for this machine: make gpu-prepare"
        return {"outcome": MISSING, "note": missing}
    log, start = LOGS / f"{stage.name}.log", time.monotonic()
    status = run_into(log, stage, limit)
    seconds = round(time.monotonic() - start, 1)
    output = log.read_text(errors="replace")
    passed, facts = judge(stage, status, output, LOGS)
    outcome = TIMED_OUT if status is None else PASSED if passed else FAILED
    if outcome != PASSED or stage.tells:
        facts["tail"] = output.splitlines()[-2 * SHOWN :]
    return {"outcome": outcome, "seconds": seconds, "status": status, **facts}


def run_into(log: Path, stage: Stage, limit: float) -> int | None:
    """Run a stage with its output in `log`; return its status, None if it met the limit."""
    assert stage.argv is not None
    with log.open("w") as out:
        process = subprocess.Popen(
            [*stage.argv],
            cwd=ROOT,
            env={**os.environ, **stage.environment},
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
    """The JSON and the archive of logs, which are replaced as a whole at each change."""

    def __init__(self, path: Path, facts: Facts, outcomes: dict[str, str]) -> None:
        self.path, self.facts = path, facts
        self.stages: dict[str, Facts] = {name: {"outcome": o} for name, o in outcomes.items()}

    @property
    def passed(self) -> bool:
        return all(each["outcome"] in (PASSED, NOT_ASKED) for each in self.stages.values())

    def set(self, stage: str, facts: Facts) -> None:
        self.stages[stage].update(facts)
        cut = [
            name
            for name, each in self.stages.items()
            if each["outcome"] in (TIMED_OUT, NOT_REACHED) or "left out" in each.get("found", "")
        ]
        whole = {**self.facts, "passed": self.passed, "cut_short": cut, "stages": self.stages}
        draft = self.path.with_suffix(".part")
        text = json.dumps(whole, indent=1).replace(str(ROOT), ".").replace(sys.executable, "python")
        draft.write_text(text + "\n")
        draft.replace(self.path)
        with tarfile.open(draft, "w:gz") as archive:
            archive.add(LOGS, arcname=self.path.stem)
        draft.replace(self.path.with_suffix(".tar.gz"))

    def table(self) -> str:
        rows = []
        for name, facts in self.stages.items():
            said = [f"{facts['seconds']} s"] if "seconds" in facts else []
            said += [f"{n} {what}" for what, n in facts.get("counts", {}).items() if n]
            said += [facts[key] for key in ("found", "note") if facts.get(key)]
            rows.append(f"{name:<10} {facts['outcome']:<12} {', '.join(said)}")
        return "\n".join(rows)


def run_stages(asked: Sequence[Stage], record: Record, seconds: float) -> None:
    end = time.monotonic() + seconds
    for stage in asked:
        limit = min(stage.limit, end - time.monotonic())
        if limit <= 0:
            return
        command = shlex.join(stage.argv or [])
        begun = {"outcome": RUNNING, "limit_seconds": round(limit), "command": command}
        record.set(stage.name, {**begun, "environment": stage.environment, "note": stage.note})
        print(f"make gpu: {stage.name}, {limit:.0f} seconds at most", flush=True)
        facts = run_stage(stage, limit)
        record.set(stage.name, facts)
        print("\n".join(facts.get("tail", [])))
        if stage.ends_all and facts["outcome"] != PASSED:
            return


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--part", type=int, choices=[1, 2], help="of the stages [both]")
    parser.add_argument("--stages", default="", help="some of them, in place of a part")
    parser.add_argument("--seconds", type=float, help="for all stages [540 for each part]")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal without a GPU")
    args = parser.parse_args(argv)
    args.seconds = args.seconds or (540 if args.part else 1080)
    return args


def choose(every: Sequence[Stage], args: argparse.Namespace) -> list[Stage]:
    names = args.stages.split()
    if unknown := set(names) - {stage.name for stage in every}:
        known = " ".join(stage.name for stage in every)
        sys.exit(f"make gpu: {min(unknown)!r} is no stage; it must be one of: {known}")
    if names:
        return [stage for stage in every if stage.name in names]
    return [stage for stage in every if args.part in (None, stage.part) or stage.part is None]


def main(argv: Sequence[str] | None = None) -> int:
    args, machine = parse_arguments(argv), probe()
    if not machine:
        sys.exit(f'make gpu: "{sys.executable}" cannot import torch; set PYTHON to one that can')
    gpu = machine.pop("gpu")
    if gpu is None and args.device == "cuda":
        sys.exit(f'make gpu: the torch of "{sys.executable}" sees no GPU')
    gpu = gpu or {"name": "rehearsal", "capability": "9.0"}
    date = datetime.datetime.now(datetime.timezone.utc)
    slug = re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower()).strip("-")
    results = args.results.absolute()
    for folder in (results, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    for old in LOGS.iterdir():
        old.unlink()
    every = stages(args.device, gpu["capability"], results, LOGS)
    asked = choose(every, args)
    tools = {tool: version_of(tool) for tool in ("nvcc", "compute-sanitizer")}
    record = Record(
        results / f"gpu-check-{slug}-{date:%Y%m%d-%H%M%S}.json",
        {
            "what": "make gpu",
            "date": f"{date:%Y-%m-%dT%H:%M:%SZ}",
            "hardware": {**gpu, "nvidia_smi": nvidia_smi(), "cores": os.cpu_count()},
            "versions": {**machine, **tools, "commit": commit()},
        },
        {stage.name: NOT_REACHED if stage in asked else NOT_ASKED for stage in every},
    )
    run_stages(asked, record, args.seconds)
    print(f"{record.table()}\n{record.path}")
    return 0 if record.passed else 1


if __name__ == "__main__":
    sys.exit(main())

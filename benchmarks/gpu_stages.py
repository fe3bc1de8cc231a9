"""The stages of gpu_check: a command, a limit, and how to read what it printed."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_bugs import BUGS, Bug
from benchmarks.gpu_build import PREPARED, ROOT

# Returns what was found, if it is a success; raises ValueError with what is wrong.
Judge = Callable[[int, str], str]
# What a GPU is asked first: launches, waits, graphs, and state in host memory.
FIRST = ("cuda_steps", "offload", "offload_*", "replayed_gradients")
FUSED = ("fused_*", "fp16_optimizer_*", "step_*", "device_scale", "unscaled_grads", "grad_versions")
ERROR_EXIT_CODE = 99
# Errors of CUDA calls are not counted: torch tries some that fail, and those of our launches are
# raised.
SANITIZER_OPTIONS = [
    f"--error-exitcode={ERROR_EXIT_CODE}",
    "--report-api-errors=no",
    "--target-processes=all",
    "--launch-timeout=0",
    "--print-limit=100",
]
# Without other installed plugins: their warnings would be errors here.
PLAIN_PYTEST = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
RECIPES = {
    "digits": "digits/digits.py --fp16 --epochs 2 --device {device}",
    "bert": "bert/bert.py --epochs 1 --device {device} --ckpt_path {out}",
    "rl": "rl/rl_fp16.py --steps 10 --device {device}",
    "char-lstm": "char_lstm/char_lstm.py --amp --steps 60 --sample 9 --device {device}",
    "speech": "speech_ctc/speech_ctc.py --steps 40 --more_steps 20 --out {out} --device {device}",
    "dcgan": "dcgan/dcgan.py --niter 1 --outf {out} --device {device}",
    "pretrain": "pretrain/pretrain.py --steps 20 --device {device}",
    "imagenet": "imagenet/main_amp.py --opt-level O2 --epochs 2 -j 2 --save {out}"
    " --device {device}",
    "imagenet-fp16": "imagenet/main_fp16_optimizer.py --fp16 --dynamic-loss-scale --epochs 2 -j 2"
    " --save {out} --device {device}",
    "monitor": "monitor/monitor.py --steps 50 --save {out}.json",
    "custom-op": "custom_op/run.py --device {device}",
    "accelerate": "trainers/with_accelerate.py",
    "lightning": "trainers/with_lightning.py",
    "transformers": "trainers/with_transformers.py",
}
NEEDED = {
    "bert": ("transformers", "sklearn"), "rl": ("transformers", "matplotlib", "tqdm"),
    "accelerate": ("accelerate", "sklearn"), "lightning": ("lightning", "sklearn"),
    "transformers": ("transformers",), "digits": ("sklearn",), "speech": ("sklearn",),
    "dcgan": ("sklearn",), "imagenet": ("sklearn",), "imagenet-fp16": ("sklearn",),
    "training": ("transformers",),
}  # fmt: skip


def lacking(name: str) -> str:
    """Return which packages a recipe or benchmark needs that are not installed."""
    absent = [package for package in NEEDED.get(name, ()) if find_spec(package) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One row of the table.

    Attributes:
        name: For the table and the log.
        argv: The command; not run if something is missing.
        judge: Reads the exit status and the output.
        limit: Seconds.
        part: 1: runs beside others; 2: is timed, and runs alone; 0: comes first in both.
        environment: Variables of the command.
        folder: Where it runs.
        missing: What it needs and is not here.
        needs: A file without which it does not run, once the stages of part 0 have; of the
            prebuilt extension.
    """

    name: str
    argv: Sequence[str]
    judge: Judge
    limit: float = 200.0
    part: int = 1
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    folder: Path = ROOT
    missing: str = ""
    needs: Path | None = None


def succeeds(status: int, output: str) -> str:
    """The command must end with status 0."""
    if status != 0:
        raise ValueError(f"exit status {status}")
    return ""


def tests_pass(status: int, output: str) -> str:
    """Some tests of pytest must pass, and none fail."""
    counts = re.findall(r"^=* ?(\d+ \w+.*) in [\d.]+s", output, re.MULTILINE)
    found = counts[-1] if counts else "pytest printed no result"
    if status != 0 or "passed" not in found:
        raise ValueError(found)
    return found


def is_clean(status: int, output: str) -> str:
    """compute-sanitizer must print a summary of no errors."""
    found = errors_of(output)
    if status != 0 or found != "0 errors":
        raise ValueError(found)
    skipped = re.findall(r"^(\w+): no time was left$", output, re.MULTILINE)
    return ", ".join([found, *(f"{name} left out" for name in skipped)])


def finds_reads_beyond(status: int, output: str) -> str:
    """compute-sanitizer must find the read beyond a tensor that is planted."""
    found = errors_of(output)
    if status != ERROR_EXIT_CODE or "Invalid __global__" not in output:
        raise ValueError(f"not found: {found}")
    return found


def errors_of(output: str) -> str:
    """Return the sum of the summaries of compute-sanitizer, one for each process."""
    counts = re.findall(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", output)
    return f"{sum(map(int, counts))} errors" if counts else "no summary"


def catches(bug: Bug) -> Judge:
    """Tests must fail with the words of a planted bug."""

    def judge(status: int, output: str) -> str:
        if status == 0 or not re.search(r"^(FAILED|ERROR) ", output, re.MULTILINE):
            raise ValueError("NOT CAUGHT")
        errors = "\n".join(re.findall(r"^E .*", output, re.MULTILINE))  # without the tests' source
        if not re.search(bug.says, errors, re.MULTILINE):
            raise ValueError(f"the tests failed, but did not say {bug.says!r}")
        return "caught"

    return judge


def stages(device: str, results: Path, logs: Path) -> list[Stage]:
    """Return the table; each part takes four minutes at most on 16 cores."""
    real, python = device != "cpu", [sys.executable]
    benchmark = [*python, "-m", "benchmarks.{}", f"--results={results}"]
    timed = [
        ("step", 70.0, ["--seconds=55"] if real else ["--quick"]),
        ("training", 65.0, []),
        ("training-offload", 35.0, ["--offload"]),
        ("offload", 25.0, ["--rounds=5"]),
        ("memory", 20.0, [] if real else ["--quick"]),
        ("activations", 15.0, [] if real else ["--quick"]),
    ]
    table = [
        Stage("build", [*python, "-m", "benchmarks.gpu_build"], succeeds, part=0),
        Stage("report", [*python, "-m", "apex_mp"], succeeds, 30.0, part=0),
        *_tests(device),
        *_sanitizers(device),
        *(_bug(slug, bug, device) for slug, bug in BUGS.items()),
        *(_recipe(name, device, logs) for name in RECIPES),
    ]
    for name, limit, options in timed:
        stub = "stub" if name == "step" and not real else device
        module, _, _ = name.partition("-")
        argv = [word.format(module) for word in benchmark] + [f"--device={stub}", *options]
        table.append(Stage(name, argv, succeeds, limit, part=2, missing=lacking(module)))
    # A rehearsal may take longer, on few cores.
    return table if real else [dataclasses.replace(each, limit=10 * each.limit) for each in table]


def _tests(device: str) -> list[Stage]:
    first, fused = (
        [str(p) for name in names for p in sorted((ROOT / "tests").glob(f"*/test_{name}.py"))]
        for names in (FIRST, FUSED)
    )
    # Each test's outcome is printed when it is known: a run that is stopped names what failed.
    command = [sys.executable, "-m", "pytest", "-v", f"--device={device}", "--device-only"]
    if find_spec("xdist"):
        command += ["-p", "xdist", f"-n{max(1, (os.cpu_count() or 1) // 4)}", "--dist=worksteal"]
    rest = [f"--ignore={path}" for path in first + fused]
    return [
        Stage("first", [*command, *first], tests_pass, 120.0, environment=PLAIN_PYTEST),
        Stage("tests", [*command, *rest, "tests"], tests_pass, environment=PLAIN_PYTEST),
        Stage("fused", [*command, *fused], tests_pass, environment=PLAIN_PYTEST),
    ]


def _sanitizers(device: str) -> list[Stage]:
    programs = [sys.executable, "-m", "benchmarks.gpu_programs", f"--device={device}"]
    if device == "cpu":
        return [Stage("programs", programs, succeeds)]
    stages = [Stage("programs", [*programs, "--profile"], succeeds)]
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    tool = shutil.which("compute-sanitizer", path=f"{home}/bin:{os.environ['PATH']}")
    missing = "" if tool else "compute-sanitizer is neither in CUDA_HOME nor on the PATH"
    # A cached block is larger than its tensor, and belongs to no tensor or to another one.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for name in ("memcheck", "initcheck", "racecheck", "synccheck"):
        # Tools that check only our kernels find them by a part of their mangled names; initcheck
        # must see all, or memory that a kernel of torch has written counts as unwritten.
        kernels = [] if name == "initcheck" else ["--kernel-name=kns=apex_mp"]
        # No summary is written by a process that is killed: the programs end before.
        argv = [tool or "", f"--tool={name}", *SANITIZER_OPTIONS, *kernels, *programs]
        argv.append("--seconds=120")
        stages += [
            Stage(name, [*argv, "eager"], is_clean, environment=uncached, missing=missing),
            Stage(f"{name}-graphs", [*argv, "graphs"], is_clean, missing=missing),
        ]
        if name == "memcheck":
            beyond = [*argv, "beyond"]
            stages.append(
                Stage("planted", beyond, finds_reads_beyond, environment=uncached, missing=missing)
            )
    return stages


def _bug(slug: str, bug: Bug, device: str) -> Stage:
    folder = PREPARED / "bugs" / slug
    where, _, names = bug.tests.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--device=cuda", str(ROOT / where), *(["-k", names] if names else [])]
    judge = catches(bug)
    if device == "cpu":  # There is no kernel to fail; the tests are there.
        command, judge = [*command, "--collect-only"], succeeds
    # In its folder, whose apex_mp Python finds first.
    package = folder / "apex_mp" / "__init__.py"
    return Stage(
        f"bug-{slug}", command, judge, 100.0, 1, PLAIN_PYTEST, folder=folder, needs=package
    )


def _recipe(name: str, device: str, logs: Path) -> Stage:
    program, *options = RECIPES[name].format(device=device, out=logs / name).split()
    argv = [sys.executable, str(ROOT / "examples" / program), *options]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    found = {"PYTHONPATH": paths}
    return Stage(f"recipe-{name}", argv, succeeds, environment=found, missing=lacking(name))

"""Measure how the code base is built: modules in a step, answers to one question, sizes, words.

    python -m benchmarks.house                    the table
    python -m benchmarks.house --show scale       also list what a line counts; --show all
    python -m benchmarks.house --save-results benchmarks/results/house.json

"wanted" is the goal; all else is measured. --quick leaves out what runs other programs: traced
steps, the collection of tests, pairs of places.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import house_source as source

ROOT = Path(__file__).resolve().parent.parent
CODE = {".py", ".pyi", ".cpp", ".cu", ".h"}
STEPS = {"FusedAdam": 8, "FP16_Optimizer": 14, "amp": 18}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of the table.

    Attributes:
        what: What is counted, with the rule.
        now: What was measured.
        wanted: The goal.
        items: What was counted, for `--show`.
    """

    what: str
    now: str
    wanted: str
    items: list[str]


def source_figures(root: Path, package: str = "apex_mp") -> dict[str, Figure]:
    """Return the figures that reading the files is enough for."""
    home = root / package
    records, others = source.overflow_answers(home)
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    pages = [page for page in pages if page.exists() and page.name != "design.md"]
    words, places = source.retired_words(home)
    found = {
        "scale": source.scale_holders(home),
        "unscale": source.unscaling_files(home),
        "wrappers": source.delegating_optimizers(home),
        "patching": source.patching_modules(home),
        "masters": source.masters_adopted(home),
        "loose": source.loose_modules(home, pages),
        "circles": source.import_circles(home),
    }
    lines = {
        "scale": ("classes with a loss scale and a method that updates it", "5"),
        "unscale": ("files that call an operator which unscales", "1"),
        "wrappers": ("optimizers whose param_groups are another's", "1"),
        "patching": ("files that set attributes by name and delete them again", "1"),
        "masters": ("classes with a method adopt()", "1"),
        "loose": ("internal modules at the top level of the package", "0"),
        "circles": ("import circles, those for annotations included", "0"),
    }
    figures = {
        "overflow": Figure(
            "records with a field that answers 'did it overflow', and other classes that keep one",
            f"{len(records)}, {len(others)}",
            "2, 0",
            records + others,
        ),
        **{
            k: Figure(what, str(len(found[k])), goal, found[k]) for k, (what, goal) in lines.items()
        },
    }
    limits = {"file": ("lines", 400), "class": ("methods", 25), "function": ("lines", 60)}
    for kind, rows in source.sizes(home).items():
        unit, limit = limits[kind]
        figures[kind] = Figure(
            f"longest {kind}, {unit}; how many are longer than wanted",
            f"{rows[0][0]}; {sum(size > limit for size, _ in rows)}",
            f"{limit}; 0",
            [f"{size} {name}" for size, name in rows[:10]],
        )
    most_common = ", ".join(f"{word} {count}" for word, count in words.most_common())
    figures["words"] = Figure(
        "retired words in names, comments and docstrings",
        str(len(places)),
        "0",
        [most_common, *places],
    )
    return figures


def tracked(root: Path) -> list[Path]:
    out = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    )
    return [root / name for name in out.stdout.split("\0") if name]


def test_figures(root: Path) -> dict[str, Figure]:
    """Return how the tests compare with the product, how many cases there are, and their time."""
    code = [path for path in tracked(root) if path.suffix in CODE and path.is_file()]
    tests = source.lines_not_blank([p for p in code if p.is_relative_to(root / "tests")])
    product = [
        p for p in code if p.is_relative_to(root / "apex_mp") or p.is_relative_to(root / "csrc")
    ]
    ours = source.lines_not_blank(product)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    cases = re.findall(r"(\d+)(?:/\d+)? tests collected", said)[-1]
    per_file: dict[str, int] = {}
    for name in re.findall(r"^(\S+?\.py)::", said, re.MULTILINE):
        per_file[name] = per_file.get(name, 0) + 1
    most = sorted(((count, name) for name, count in per_file.items()), reverse=True)[:10]
    nightly = json.loads((root / "benchmarks/results/nightly.json").read_text())["test"]
    return {
        "tests": Figure(
            "tests : product, lines not blank", f"{tests / ours:.2f}", "1.5", [f"{tests} : {ours}"]
        ),
        "cases": Figure(
            "cases of the tests", cases, "what is needed", [f"{c} {n}" for c, n in most]
        ),
        "minutes": Figure(
            "minutes of make test on two cores",
            f"{nightly['seconds'] / 60:.1f}",
            "4",
            [f"{nightly['processor']}, {nightly['date']}"],
        ),
    }


def duplicates(root: Path) -> Figure:
    """Count pairs of places, with the command `duplicates`, in a copy without tests."""
    what = "pairs of places that share six lines or more, without tests"
    if shutil.which("duplicates") is None:
        return Figure(what, "not measured: the command `duplicates` is missing", "15", [])
    with tempfile.TemporaryDirectory() as folder:
        for path in tracked(root):
            name = path.relative_to(root)
            if name.parts[0] != "tests" and path.suffix in {*CODE, ".toml", ""} and path.is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, Path(folder) / name)
        command = ["duplicates", "--repo", folder, "--most", "200", "--seconds", "120"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, *rows = said.splitlines()
    number = re.match(r"\d+", first)
    thin = sum(row.endswith("boilerplate") or " boilerplate (" in row for row in rows)
    now = f"{number[0]}, {thin} of them boilerplate" if number else first
    return Figure(what, now, "15", rows)


def _fused_adam() -> Callable[[], Any]:
    import torch

    from apex_mp.optimizers import FusedAdam

    model: Any = torch.nn.Linear(8, 8)
    optimizer = FusedAdam(model.parameters())

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fp16_optimizer() -> Callable[[], Any]:
    import torch

    from apex_mp.optimizers import FP16_Optimizer, FusedAdam

    model = torch.nn.Linear(8, 8).half()
    optimizer = FP16_Optimizer(
        FusedAdam(model.parameters()),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 8.0},
    )

    def step() -> None:
        optimizer.backward(model(torch.ones(2, 8).half()).float().sum())
        optimizer.step()
        optimizer.zero_grad()

    return step


def _amp() -> Callable[[], Any]:
    import torch

    from apex_mp import amp
    from apex_mp.optimizers import FusedAdam

    handle = amp.init()
    model = torch.nn.Linear(8, 8)
    optimizer = FusedAdam(model.parameters())

    def step() -> None:
        loss = model(torch.ones(2, 8)).float().sum()
        optimizer.zero_grad()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


PROGRAMS = {"FusedAdam": _fused_adam, "FP16_Optimizer": _fp16_optimizer, "amp": _amp}


def files_run(step: Callable[[], Any], warm_up: int = 20) -> set[str]:
    """Return the files of which a line runs in one call of `step`, after `warm_up` others."""
    for _ in range(warm_up):
        step()
    found: set[str] = set()

    def trace(frame: Any, _event: str, _arg: Any) -> None:
        found.add(frame.f_code.co_filename)

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type, unused-ignore]
    return found


def modules_run(program: str) -> list[str]:
    """Return the modules of apex_mp of which a line runs in one step of a program."""
    import apex_mp

    home = Path(apex_mp.__file__).parent
    files = {Path(name) for name in files_run(PROGRAMS[program]())}
    inside = [file for file in files if file.is_relative_to(home)]
    return sorted(source.module_name(file, home.parent) for file in inside)


def step_figures() -> dict[str, Figure]:
    """Return how many modules run in a step; each program has a process of its own."""
    figures = {}
    for name, goal in STEPS.items():
        command = [sys.executable, "-m", "benchmarks.house", "--trace", name]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        modules = json.loads(said.splitlines()[-1])  # The optimizer prints, too.
        what = f"modules of which a line runs in one warmed-up step, {name}"
        figures[f"step-{name}"] = Figure(what, str(len(modules)), str(goal), modules)
    return figures


def table(figures: dict[str, Figure]) -> str:
    rows = ["| what | now | wanted |", "|---|---|---|"]
    return "\n".join(rows + [f"| {f.what} | {f.now} | {f.wanted} |" for f in figures.values()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only what reads the source")
    parser.add_argument("--show", metavar="LINE", action="append", default=[], help="list a line")
    parser.add_argument("--save-results", type=Path, metavar="FILE", help="write JSON")
    parser.add_argument("--trace", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trace:
        print(json.dumps(modules_run(args.trace)))
        return
    figures = source_figures(ROOT)
    if not args.quick:
        figures = {**step_figures(), **figures, "pairs": duplicates(ROOT), **test_figures(ROOT)}
    unknown = {*args.show} - {*figures, "all"}
    if unknown:
        parser.error(f"no line {', '.join(sorted(unknown))}; there are {', '.join(figures)}")
    print(table(figures))
    for name in figures if "all" in args.show else args.show:
        print(f"\n{figures[name].what}:", *figures[name].items, sep="\n  ")
    if args.save_results:
        saved = {n: {"what": f.what, "now": f.now, "wanted": f.wanted} for n, f in figures.items()}
        args.save_results.write_text(json.dumps(saved, indent=2) + "\n")


if __name__ == "__main__":
    main()

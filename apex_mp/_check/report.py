"""The report of `python -m apex_mp check`, as text and as JSON."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from apex_mp._as_apex.evidence import DEFAULT, Evidence, era_of, evidence_in
from apex_mp._as_apex.sources import Source, Use, files_of, is_of_apex, name_of, places_of, read
from apex_mp._check import needs

Places = dict[str, list[str]]

# How files name a version: releases of torch, or year and month of a container.
_PINS = re.compile(
    r"\b(?:py)?torch(?:/pytorch)?\s*(?:==|=|:)\s*v?(\d+)\.(\d+)|nvidia/pytorch:(\d\d)\.(\d\d)", re.I
)
_TEXTS = (
    "requirements*.txt",
    "setup.py",
    "setup.cfg",
    "environment*.y*ml",
    "*ockerfile*",
    "README*",
)
_LIKELY = re.compile(r"train|pretrain|finetune|main|run")
_SHOWN = 3


@dataclasses.dataclass
class Report:
    """What a repository needs.

    Attributes:
        files: How many files were read.
        names: Names of apex, and where they are used.
        era: The era of the names, arguments and packages.
        evidence: Evidence for the era.
        modernize: What `--modernize` supplies, and where it is used.
        gpu: Where a GPU is needed.
        masters: What `--master-weights` is for, and where it is, in code that does not use apex.
        unsupported: What will not work with its remedy, and where it is used.
        scripts: Files that can be run, the likeliest first.
    """

    files: int
    names: Places
    era: str
    evidence: list[Evidence]
    modernize: Places
    gpu: list[str]
    masters: Places
    unsupported: Places
    scripts: list[str]

    def options(self) -> list[str]:
        """Return the options of `run` that the code needs, on a machine with a GPU."""
        era = ["--era", self.era] if self.evidence and self.era != DEFAULT else []
        modernize = ["--modernize"] if self.modernize else []
        return [*era, *modernize, *(["--master-weights"] if self.masters else [])]

    def as_json(self) -> dict[str, Any]:
        """Return the report as lists, dicts and strings."""
        return {**dataclasses.asdict(self), "options": self.options()}

    def text(self, *, has_gpu: bool) -> str:
        """Return the report as text."""
        return "\n".join(self._lines(has_gpu))

    def _lines(self, has_gpu: bool) -> Iterator[str]:
        yield f"{self.files} Python file{'' if self.files == 1 else 's'}, read but not run"
        yield from _section("names of apex", self.names) or ["no name of apex is used"]
        if self.evidence:
            yield f"era {self.era}, by"
            yield from _rows(_grouped((each.what, each.where) for each in self.evidence))
        yield from _section("--modernize supplies", self.modernize)
        if self.gpu:
            yield f"a GPU is asked for at {_shown(self.gpu)}; --device cpu runs it on a CPU"
        yield from _section("--master-weights gives float32 masters to", self.masters)
        yield from _section("will not work", self.unsupported)
        on_cpu = [] if has_gpu or not self.gpu else ["--device", "cpu"]
        for script in self.scripts[:1]:
            options = [*self.options(), *on_cpu]
            words = ["python", "-m", "apex_mp", "run", *options, *_as_arguments(script)]
            yield "start with"
            yield f"  {shlex.join(words)} ..."
        if len(self.scripts) > 1:
            yield f"or with {_shown(self.scripts[1:])}"


def examine(path: Path) -> Report:
    """Read a script or a folder, and report what it needs."""
    sources, broken = _read_all(path)
    names = _grouped(
        (name, use.where)
        for source in sources
        for use in source.uses()
        if is_of_apex(use.name)
        for name in _of_table(use.name)
    )
    evidence = [each for source in sources for each in evidence_in(source)]
    decided_by = era_of(evidence)
    if not evidence and names and path.is_dir():
        evidence = [*_of_packages(path)]
        decided_by = era_of(evidence)
    unsupported = [use for source in sources for use in needs.unsupported(source)]
    unsupported += _of_eras(evidence, decided_by)
    halved = [] if names else [use for source in sources for use in needs.in_16_bits(source)]
    if halved:
        halved += [use for source in sources for use in needs.scaled(source)]
    return Report(
        files=len(sources) + len(broken),
        names=names,
        era=decided_by,
        evidence=[each for each in evidence if decided_by in each.eras],
        modernize=_grouped(use for source in sources for use in needs.modernized(source)),
        gpu=[*dict.fromkeys(where for source in sources for where in needs.on_gpu(source))],
        masters=_grouped(halved),
        unsupported=_grouped([*broken, *unsupported, *_cuda_sources(path)]),
        scripts=_scripts(path, sources),
    )


def _of_table(name: str) -> list[str]:
    places = [f"{module}.{each}" for module, each in places_of(name)[:1]]
    return places or ([name] if name.endswith(".*") else [])


def _read_all(path: Path) -> tuple[list[Source], list[Use]]:
    sources, broken = [], []
    for file in files_of(path):
        try:
            sources.append(read(file, path))
        except (SyntaxError, OSError) as error:
            name = name_of(file, path)
            if isinstance(error, SyntaxError):
                place = f"{name}:{error.lineno or 1}"
                broken.append(Use(f"is not Python of today: {error.msg}", place))
            else:
                broken.append(Use(f"cannot be read: {error.strerror}", name))
    return sources, broken


def _of_eras(evidence: Iterable[Evidence], era: str) -> Iterator[Use]:
    """Yield the evidence for eras other than the chosen one."""
    for each in evidence:
        if era not in each.eras:
            yield Use(f"{each.what} is of era {' and '.join(each.eras)}, not {era}", each.where)


def _of_packages(root: Path) -> Iterator[Evidence]:
    """Yield evidence from required versions of torch, for code whose names fit all eras."""
    for file in (file for pattern in _TEXTS for file in sorted(root.glob(pattern))):
        for found in _PINS.finditer(file.read_text("utf-8", "replace")):
            major, minor, year, month = (int(each) if each else None for each in found.groups())
            if year is not None:
                since = (2000 + year, month or 1)
                later = "2020" if since >= (2020, 1) else "2019-08"
                era = later if since >= (2019, 8) else "2019-03"
            else:
                version = (major or 0, minor or 0)
                later = "2020" if version >= (1, 4) else "2019-08"
                era = later if version >= (1, 2) else "2019-03"
            yield Evidence(found[0], file.name, (era,))


def _cuda_sources(path: Path) -> Iterator[Use]:
    for file in sorted(path.rglob("*.cu")) if path.is_dir() else ():
        yield Use(
            "CUDA code of its own needs a GPU, and to be built", file.relative_to(path).as_posix()
        )


def _scripts(path: Path, sources: Iterable[Source]) -> list[str]:
    """Return files that are meant to be run; those that use apex or are named so come first."""

    def rank(source: Source) -> tuple[bool, bool, int, str]:
        uses_apex = any(is_of_apex(use.name) for use in source.uses())
        name = Path(source.name)
        return not uses_apex, not _LIKELY.search(name.stem), len(name.parts), source.name

    if path.is_file():
        return [path.as_posix()]
    found = [source for source in sources if _is_program(source)]
    return [(path / each.name).as_posix() for each in sorted(found, key=rank)]


def _as_arguments(script: str) -> list[str]:
    """Return the arguments of python that run a script: `-m` and a module in a package."""
    path = Path(script)
    folder, module = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        module.insert(0, folder.name)
        folder = folder.parent
    if len(module) == 1:
        return [script]
    return ["-m", ".".join(module).removesuffix(".__main__")]


def _is_program(source: Source) -> bool:
    return any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        for node in source.tree.body
    )


# Text.


def _grouped(pairs: Iterable[tuple[str, str]]) -> Places:
    found: Places = {}
    for what, where in pairs:
        places = found.setdefault(what, [])
        if where not in places:
            places.append(where)
    return found


def _section(title: str, places: Places) -> list[str]:
    return [title, *_rows(places)] if places else []


def _rows(places: Places) -> list[str]:
    width = min(52, max(map(len, places), default=0))
    return [f"  {what:<{width}}  {_shown(where)}" for what, where in sorted(places.items())]


def _shown(places: list[str]) -> str:
    more = len(places) - _SHOWN
    return ", ".join(places[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

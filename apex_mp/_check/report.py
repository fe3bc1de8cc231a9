"""The report of `python -m apex_mp check`, as text and as JSON."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from apex_mp._as_apex.evidence import DEFAULT, Evidence, era_of, evidence_in, in_libraries
from apex_mp._as_apex.sources import (
    Source,
    Use,
    files_of,
    imports_from,
    is_of_apex,
    local_imports,
    name_of,
    places_of,
    read,
)
from apex_mp._check import needs
from apex_mp._run.modernize.source import without_async

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
_TRAINS = {"backward", "scale_loss", "fit", "minimize"}


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
        optional: What is not here where an ImportError is caught, so that the code does without it.
        unused: What will not work, in files that no script imports.
        cuda: CUDA code of its own.
        left_out: Checkouts of apex itself, which are not read.
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
    optional: Places
    unused: Places
    cuda: list[str]
    left_out: list[str]
    unsupported: Places
    scripts: list[str]

    @property
    def status(self) -> int:
        """1 if a script will not work, 3 if a part that needs CUDA code will not, else 0."""
        return 1 if self.unsupported else 3 if self.cuda else 0

    def options(self) -> list[str]:
        """Return the options of `run` that the code needs, on a machine with a GPU."""
        era = ["--era", self.era] if self.evidence and self.era != DEFAULT else []
        modernize = ["--modernize"] if self.modernize else []
        return [*era, *modernize, *(["--master-weights"] if self.masters else [])]

    def as_json(self) -> dict[str, Any]:
        """Return the report as lists, dicts and strings."""
        return {**dataclasses.asdict(self), "options": self.options(), "status": self.status}

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
        yield from _section("optional, and not here", self.optional)
        yield from _section("will not work, in files that no script imports", self.unused)
        if self.cuda:
            yield f"CUDA code of its own, at {_shown(self.cuda)}, needs a GPU, and to be built"
            yield "  the rest may run without it"
        if self.left_out:
            yield f"apex itself is at {_shown(self.left_out)}; it is not read"
        yield from _section("will not work", self.unsupported)
        on_cpu = [] if has_gpu or not self.gpu else ["--device", "cpu"]
        options = [*self.options(), *on_cpu]
        folder, arguments = (
            _as_arguments(self.scripts[0]) if self.scripts else ("", ["YOUR_SCRIPT"])
        )
        path = f"PYTHONPATH={shlex.quote(folder)} " if folder else ""
        yield "start with" if self.scripts else "start your script with"
        yield f"  {path}{shlex.join(['python', '-m', 'apex_mp', 'run', *options, *arguments])} ..."
        if len(self.scripts) > 1:
            yield f"or with {_shown(self.scripts[1:])}"


@dataclasses.dataclass
class _Findings:
    """What files hold, in the order in which they are read; lists of pairs of what and where."""

    names: list[Use] = dataclasses.field(default_factory=list)
    optional: list[Use] = dataclasses.field(default_factory=list)
    evidence: list[Evidence] = dataclasses.field(default_factory=list)
    modernize: list[Use] = dataclasses.field(default_factory=list)
    gpu: list[str] = dataclasses.field(default_factory=list)
    halved: list[Use] = dataclasses.field(default_factory=list)
    scaled: list[Use] = dataclasses.field(default_factory=list)
    unsupported: list[tuple[Path, Use]] = dataclasses.field(default_factory=list)
    imports: set[str] = dataclasses.field(default_factory=set)
    programs: dict[Path, bool] = dataclasses.field(default_factory=dict)  # is it for certain?
    files_imported: dict[Path, set[Path]] = dataclasses.field(default_factory=dict)
    of_apex: set[Path] = dataclasses.field(default_factory=set)
    training: set[Path] = dataclasses.field(default_factory=set)

    def add(self, source: Source, file: Path, root: Path) -> None:
        """Add a file; the trees of all files would not fit into memory."""
        of_apex = [use for use in source.uses if is_of_apex(use.name)]
        self.names += [Use(name, use.where) for use in of_apex for name in _of_table(use.name)]
        self.evidence += evidence_in(source)
        self.modernize += needs.modernized(source)
        self.gpu += needs.on_gpu(source)
        self.halved += needs.in_16_bits(source)
        self.scaled += needs.scaled(source)
        for name, use in needs.unsupported(source):
            if source.is_optional(name):
                self.optional.append(use)
            else:
                self.unsupported.append((file, use))
        self.imports |= source.packages
        self.files_imported[file] = local_imports(source, file, root) if root.is_dir() else set()
        if of_apex:
            self.of_apex.add(file)
        trains = any(getattr(node, "attr", "") in _TRAINS for node in source.nodes)
        if trains:
            self.training.add(file)
        is_certain = file == root or _is_guarded(source)
        if is_certain or trains or _LIKELY.search(file.stem):
            self.programs[file] = is_certain

    def scripts(self, root: Path) -> list[Path]:
        """Return the files that can be run, the likeliest first."""
        imported = {each for files in self.files_imported.values() for each in files}
        sure = [file for file, is_certain in self.programs.items() if is_certain]
        found = [*sure, *(file for file in self.programs if file not in {*sure} | imported)]

        def rank(file: Path) -> tuple[bool, bool, bool, bool, int, str]:
            reached = self.reached([file])
            parts = file.relative_to(root).parts
            is_test = file.stem.startswith("test") or "tests" in parts
            name, places = bool(_LIKELY.search(file.stem)) and not is_test, len(parts)
            trains = not self.training.isdisjoint(reached)
            uses = not self.of_apex.isdisjoint(reached)
            return not (trains and name), not trains, not uses, not name, places, str(file)

        return sorted(found, key=rank)

    def reached(self, starts: Iterable[Path]) -> set[Path]:
        """Return files and what they import, directly or not."""
        found, waiting = {*starts}, [*starts]
        while waiting:
            new = self.files_imported.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found


def examine(path: Path, progress: Callable[[int, int], None] | None = None) -> Report:
    """Read a script or a folder, and report what it needs."""
    found, (files, left_out) = _Findings(), _without_apex(files_of(path), path)
    with _without_garbage_collection():
        for number, file in enumerate(files):
            _add(found, file, path)
            if progress is not None:
                progress(number + 1, len(files))
    evidence = found.evidence
    if not evidence and found.names and path.is_dir():
        evidence = [*_of_packages(path)]
    if not evidence:
        evidence = in_libraries(found.imports, path if path.is_dir() else path.parent)
    decided_by = era_of(evidence)
    scripts = found.scripts(path)
    counted = found.reached(scripts) if scripts else {*files}
    wrong = [*found.unsupported, *_of_eras(found.evidence, decided_by, path)]
    halved = [] if found.names else found.halved
    return Report(
        files=len(files),
        names=_grouped(found.names),
        era=decided_by,
        evidence=[each for each in evidence if decided_by in each.eras],
        modernize=_grouped(found.modernize),
        gpu=[*dict.fromkeys(found.gpu)],
        masters=_grouped([*halved, *(found.scaled if halved else ())]),
        optional=_grouped(found.optional),
        unused=_grouped(use for file, use in wrong if file not in counted),
        cuda=_cuda_sources(path),
        left_out=left_out,
        unsupported=_grouped(use for file, use in wrong if file in counted),
        scripts=[file.as_posix() for file in scripts],
    )


def _add(found: _Findings, file: Path, path: Path) -> None:
    name = name_of(file, path)
    try:
        found.add(read(file, path), file, path)
    except RecursionError:
        found.unsupported.append((file, Use("is nested too deeply to be read", name)))
    except SyntaxError as error:
        text = without_async(file.read_bytes())
        use = Use(f"is not Python of today: {error.msg}", f"{name}:{error.lineno or 1}")
        try:
            source = None if text is None else read(file, path, text)
        except SyntaxError:
            source = None
        if source is not None:
            found.modernize.append(Use("x.cuda(async=True)", use.where))
            found.add(source, file, path)
            return
        found.unsupported.append((file, use))
        if path.is_file() or b"__main__" in file.read_bytes():
            found.programs[file] = True
    except OSError as error:
        found.unsupported.append((file, Use(f"cannot be read: {error.strerror}", name)))


def _without_apex(files: list[Path], root: Path) -> tuple[list[Path], list[str]]:
    """Return the files that are not of a checkout of apex, and where there is one."""

    def is_apex(folder: Path) -> bool:
        inside = folder / "apex" / "__init__.py"
        is_clone = inside.is_file() and (folder / "setup.py").is_file()
        return is_clone or (folder.name == "apex" and (folder / "amp" / "__init__.py").is_file())

    if is_apex(root):
        return files, []
    below = {folder for file in files for folder in file.parents if root in folder.parents}
    found = {folder for folder in below if is_apex(folder)}
    kept = [file for file in files if found.isdisjoint(file.parents)]
    outer = sorted(folder for folder in found if found.isdisjoint(folder.parents))
    return kept, [folder.relative_to(root).as_posix() for folder in outer]


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Trees have no cycles, and searching them for some takes most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _of_table(name: str) -> list[str]:
    places = [f"{module}.{each}" for module, each in places_of(name)[:1]]
    return places or ([name] if name.endswith(".*") else [])


def _of_eras(evidence: Iterable[Evidence], era: str, root: Path) -> Iterator[tuple[Path, Use]]:
    """Yield the evidence for eras other than the chosen one, with its file."""
    for each in evidence:
        if era not in each.eras:
            name = each.where.rpartition(":")[0]
            said = f"{each.what} is of era {' and '.join(each.eras)}, not {era}"
            yield root / name if root.is_dir() else root, Use(said, each.where)


def _of_packages(root: Path) -> Iterator[Evidence]:
    """Yield evidence from required versions of torch, for code whose names fit all eras."""
    for file in (file for pattern in _TEXTS for file in sorted(root.glob(pattern))):
        text = ""
        if file.is_file():
            with contextlib.suppress(OSError):
                text = file.read_text("utf-8", "replace")
        for found in _PINS.finditer(text):
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


def _cuda_sources(path: Path) -> list[str]:
    files = _without_apex(files_of(path, ".cu"), path)[0] if path.is_dir() else []
    return [file.relative_to(path).as_posix() for file in files]


def _as_arguments(script: str) -> tuple[str, list[str]]:
    """Return what runs a script: a folder for PYTHONPATH, or "", and the arguments of python.

    A script that imports from the package that it is in runs as a module.
    """
    place = Path(script).resolve()
    folder, module = place.parent, [place.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        module.insert(0, folder.name)
        folder = folder.parent
    is_module = len(module) > 1 and (place.stem == "__main__" or imports_from(place, module[0]))
    if not is_module:
        return "", [f"./{script}" if script.startswith("-") else script]
    name = ".".join(module).removesuffix(".__main__")
    return ("" if folder == Path.cwd() else folder.as_posix()), ["-m", name]


def _is_guarded(source: Source) -> bool:
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

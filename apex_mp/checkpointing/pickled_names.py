"""Find the classes and functions that a checkpoint asks for, without loading it; for messages."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from typing import IO, Any

# A file that is no archive has five pickles: number, version, system, object and storages.
_PICKLES_IN_OLD_FILE = 5


def names_in(file: IO[bytes]) -> list[str]:
    """Return the full names that the pickles of a checkpoint ask for, as far as they can be read.

    Args:
        file: At the place where the checkpoint begins.
    """
    names: dict[str, None] = {}
    try:
        for stream in _pickles(file):
            for name in _names_in_pickle(stream):
                names[name] = None
    except Exception:  # No pickle from here on: pickletools and zipfile raise many things.
        pass
    return [*names]


def _pickles(file: IO[bytes]) -> Iterator[IO[bytes]]:
    start = file.tell()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    with archive.open(name) as stream:
                        yield stream
        return
    file.seek(start)
    for _ in range(_PICKLES_IN_OLD_FILE):
        yield file


def _names_in_pickle(stream: IO[bytes]) -> Iterator[str]:
    strings: list[str] = []
    memo: dict[Any, Any] = {}
    top: Any = None
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL":
            yield ".".join(strings[-2:])
        elif "PUT" in opcode.name or opcode.name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = top
            continue
        top = memo.get(argument) if "GET" in opcode.name else argument
        if isinstance(top, str):
            strings.append(top)

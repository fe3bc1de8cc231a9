"""Files as old programs and hostile ones wrote them, made without the classes that they name."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def module_of(full_name: str) -> Iterator[type]:
    """Let a class of a full name be there, for pickle to write it down, and go again."""
    path, _, name = full_name.rpartition(".")
    parts = path.split(".")
    added = {".".join(parts[: count + 1]) for count in range(len(parts))} - {*sys.modules}
    made = type(name, (), {"__module__": path})
    for each in added:
        sys.modules[each] = types.ModuleType(each)
    had = getattr(sys.modules[path], name, None)
    setattr(sys.modules[path], name, made)
    try:
        yield made
    finally:
        if had is not None:
            setattr(sys.modules[path], name, had)
        for each in added:
            del sys.modules[each]


def save_object(path: Path, full_name: str, attributes: dict[str, Any], **options: Any) -> None:
    """Save {"scaler": an object, "tensor": ...} as a program did that had its class."""
    with module_of(full_name) as made:
        scaler = made()
        vars(scaler).update(attributes)
        torch.save({"scaler": scaler, "tensor": torch.arange(3.0)}, path, **options)


def as_zip(pickled: bytes, path: Path) -> None:
    """Put a pickle where torch.load looks for it in an archive."""
    buffer = io.BytesIO()
    torch.save({}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))


def as_old_file(pickled: bytes, path: Path) -> None:
    """Put a pickle where torch.load looks for it in a file of before 1.6."""
    head = [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {}]
    parts = [*(pickle.dumps(one, protocol=2) for one in head), pickled]
    path.write_bytes(b"".join([*parts, pickle.dumps([], protocol=2)]))


CONTAINERS = {"zip": as_zip, "old": as_old_file}


def by_global(module: str, name: str, *arguments: Any) -> bytes:
    """Pickle a call of what GLOBAL names."""
    called = pickle.dumps(arguments, protocol=2)[2:-1]
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + called + b"R."


def by_stack_global(module: str, name: str, *arguments: Any) -> bytes:
    """The same by STACK_GLOBAL, which pickle protocol 4 added."""
    called = pickle.dumps(arguments, protocol=2)[2:-1]
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93" + called + b"R."


def by_instance(module: str, name: str, argument: str) -> bytes:
    """The same by INST of protocol 0."""
    return b"(" + _text(argument) + f"i{module}\n{name}\n".encode() + b"."


def built(full_name: str, state: Any, *arguments: Any) -> bytes:
    """Pickle an object of a class, made with arguments, and the state that it is given."""
    module, _, name = full_name.rpartition(".")
    parts = [pickle.dumps(one, protocol=2)[2:-1] for one in (arguments, state)]
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + parts[0] + b"\x81" + parts[1] + b"b."


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()

"""Checkpoint files: load apex's of 2018 to 2020 without running their code; save atomically."""

from __future__ import annotations

import os
import pickle
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import _weights_only_unpickler

from apex_mp.saved.pickles import Receivers, names_in

__all__ = [
    "load_checkpoint",
    "save_checkpoint",
]

# How files of torch.save begin: an archive or, until PyTorch 1.6, the pickle of a fixed number.
_ZIP_MAGIC = b"PK\x03\x04"
_OLD_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_TRUSTED = (
    ". To let through a class that you trust, call torch.serialization.add_safe_globals([Class]) "
    "before"
)

# torch has one list of safe names for the whole process.
_one_at_a_time = threading.Lock()


def save_checkpoint(state: Any, path: str | os.PathLike[str]) -> None:
    """Call `torch.save` so that the old file survives if the process is killed meanwhile.

    The file is written as `path` with `.new` appended, and then renamed.

    Args:
        state: What to save.
        path: The file's name; an existing file is replaced.
    """
    new = Path(f"{os.fspath(path)}.new")
    try:
        torch.save(state, new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def load_checkpoint(path: str | os.PathLike[str] | IO[bytes], map_location: Any = "cpu") -> Any:
    """Load a file of `torch.save`, also with loss scalers of apex in it, without running its code.

    This is `torch.load(weights_only=True)`, which loads tensors, containers and plain values, with
    three more classes: `apex.fp16_utils.loss_scaler.LossScaler` and `DynamicLossScaler`, and
    `apex.amp.scaler.LossScaler`. They become those of apex_mp, which `load_state_dict` takes.
    Classes that were added by `torch.serialization.add_safe_globals` are loaded too.

    Args:
        path: A file's name, or a file opened for reading in binary.
        map_location: As in torch.load; `load_state_dict` moves tensors to their devices ["cpu"].

    Returns:
        What was saved.

    Raises:
        pickle.UnpicklingError: The file asks for other classes or functions, which the message
            names; they are not imported or called. Or it is no checkpoint, or is cut short.
        TypeError: `path` is neither a name nor such a file.
    """
    if isinstance(path, (str, os.PathLike)):
        with open(path, "rb") as file:
            return _load(file, os.fspath(path), map_location)
    if not callable(getattr(path, "read", None)) or not isinstance(path.read(0), bytes):
        raise TypeError(
            f"load_checkpoint: path is a {type(path).__name__}; it must be a file's name, or a "
            "file opened for reading in binary"
        )
    return _load(path, str(getattr(path, "name", "the file")), map_location)


def _load(file: IO[bytes], name: str, map_location: Any) -> Any:
    start = file.tell()
    if _is_tar(file):
        raise pickle.UnpicklingError(
            f"load_checkpoint: {name} is in the tar format of PyTorch before 0.2, which cannot be "
            "read safely; no apex has written such a file"
        )
    file.seek(start)
    receivers = Receivers()
    with _one_at_a_time, torch.serialization.safe_globals(receivers.aliases):
        try:
            loaded = torch.load(file, map_location=map_location, weights_only=True)
            receivers.check_complete()
            return loaded
        except pickle.UnpicklingError as error:
            file.seek(start)
            unknown = _unknown_names(file)
            file.seek(start)
            if not receivers.refusal and not unknown:
                _check_is_checkpoint(file, name)
            reason = receivers.refusal or unknown or _reason(error)
            trusted = _TRUSTED if unknown and not receivers.refusal else ""
            raise pickle.UnpicklingError(
                f"load_checkpoint: {name} asks for {reason}; a checkpoint may hold tensors, plain "
                f"values and the loss scalers of apex. Nothing else of it was run{trusted}"
            ) from None
        except OSError:
            raise
        except Exception as error:  # On damaged bytes torch raises errors of any type.
            file.seek(start)
            if _loads_to_cpu(file):
                raise  # The error is of map_location.
            file.seek(start)
            _check_is_checkpoint(file, name)
            raise _damaged(name) from error


def _is_tar(file: IO[bytes]) -> bool:
    """Return whether a file is a tar archive with members; a file of zeros is an empty archive."""
    start = file.tell()
    if not tarfile.is_tarfile(file):
        return False
    file.seek(start)
    with tarfile.open(fileobj=file) as archive:
        return archive.next() is not None


def _loads_to_cpu(file: IO[bytes]) -> bool:
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


def _check_is_checkpoint(file: IO[bytes], name: str) -> None:
    """Refuse a file that torch.save has not written, or that is cut short."""
    beginning = file.read(max(map(len, (_OLD_MAGIC, _ZIP_MAGIC))))
    if beginning.startswith(_OLD_MAGIC):
        return
    if not beginning.startswith(_ZIP_MAGIC):
        fact = "holds nothing that torch.save has written" if beginning else "is empty"
        raise pickle.UnpicklingError(f"load_checkpoint: {name} is no checkpoint: it {fact}")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.namelist()
    except Exception as error:  # zipfile raises other errors than BadZipFile too.
        raise _damaged(name) from error
    if any(entry.endswith("/constants.pkl") for entry in entries):
        raise pickle.UnpicklingError(
            f"load_checkpoint: {name} is a TorchScript archive, which holds code; it is for "
            "torch.jit.load, if you trust it"
        )
    if not any(entry.endswith("/data.pkl") for entry in entries):
        raise pickle.UnpicklingError(
            f"load_checkpoint: {name} is no checkpoint: it is an archive, but not of torch.save"
        )


def _damaged(name: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"load_checkpoint: {name} is cut short, or damaged; copy or save it again"
    )


def _unknown_names(file: IO[bytes]) -> str:
    """Return the names that torch does not know, joined; call it while ours are registered."""
    known = {
        **_weights_only_unpickler._get_allowed_globals(),
        **_weights_only_unpickler._get_user_allowed_globals(),  # type: ignore[no-untyped-call]
    }
    return ", ".join(name for name in names_in(file) if name not in known)


def _reason(error: pickle.UnpicklingError) -> str:
    """Return the message of torch's unpickler, without its advice to load unsafely."""
    said = str(error).split("WeightsUnpickler error: ")[-1]
    said = said.split("Check the documentation")[0].strip()
    return f"what torch.load(weights_only=True) refuses ({said})"

"""load_checkpoint: files of the apex of 2018 to 2020, without running anything that is in them."""

from __future__ import annotations

import os
import pickle
import tarfile
import threading
from typing import IO, Any

import torch
from torch import _weights_only_unpickler

from apex_mp._pickled_names import names_in
from apex_mp._pickled_scalers import Receivers

# torch has one list of safe names for the whole process.
_one_at_a_time = threading.Lock()


def load_checkpoint(path: str | os.PathLike[str] | IO[bytes], map_location: Any = "cpu") -> Any:
    """Load what `torch.save` wrote, the loss scalers of apex among it, and nothing that could run.

    It is `torch.load(weights_only=True)`, which knows tensors, containers and plain values, and
    three classes more: `apex.fp16_utils.loss_scaler.LossScaler` and `DynamicLossScaler`, and
    `apex.amp.scaler.LossScaler`. They arrive as those of apex_mp, which `load_state_dict` takes.
    What this process itself has allowed by `torch.serialization.add_safe_globals` is known too.

    Args:
        path: A file's name, or a file opened for reading in binary.
        map_location: As in torch.load; `load_state_dict` moves tensors to where they belong
            ["cpu"].

    Returns:
        What was saved.

    Raises:
        pickle.UnpicklingError: The file asks for something else, which the message names; nothing
            of that has been imported or called then.
    """
    if isinstance(path, (str, os.PathLike)):
        with open(path, "rb") as file:
            return _load(file, os.fspath(path), map_location)
    return _load(path, str(getattr(path, "name", "the file")), map_location)


def _load(file: IO[bytes], name: str, map_location: Any) -> Any:
    start = file.tell()
    if tarfile.is_tarfile(file):
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
            reason = receivers.refusal or _unknown_names(file) or _reason(error)
            raise pickle.UnpicklingError(
                f"load_checkpoint: {name} asks for {reason}; a checkpoint may hold tensors, plain "
                "values and the loss scalers of apex. Nothing else of it was run"
            ) from None


def _unknown_names(file: IO[bytes]) -> str:
    """The names that torch does not know, joined; to be asked while ours are among the known."""
    known = {
        **_weights_only_unpickler._get_allowed_globals(),
        **_weights_only_unpickler._get_user_allowed_globals(),  # type: ignore[no-untyped-call]
    }
    return ", ".join(name for name in names_in(file) if name not in known)


def _reason(error: pickle.UnpicklingError) -> str:
    """What torch's unpickler said, without the advice to load unsafely."""
    said = str(error).split("WeightsUnpickler error: ")[-1]
    said = said.split("Check the documentation")[0].strip()
    return f"what torch.load(weights_only=True) refuses ({said})"

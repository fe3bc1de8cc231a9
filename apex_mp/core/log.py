"""Messages to the user: warnings, and log records of `apex_mp`, which a default handler prints."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import warnings

import torch

_PACKAGE = logging.getLogger("apex_mp")
# Frames of torch's wrappers lie between the user's line and ours.
_NOT_THE_USERS = (
    *(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__)),
    contextlib.__file__,
)


def see(part: str) -> str:
    """Return the command that prints a section of docs/troubleshooting.md, to end a message."""
    return f" [python -m apex_mp explain {part}]"


def counted(number: int, noun: str) -> str:
    """Return a number and a noun: "1 parameter", "2 parameters"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def warn(message: str, part: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the first line outside of apex_mp and torch, in the first process of a group."""
    if not is_first_process():
        return
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message + see(part), category, stacklevel=level + 1)


def logger(name: str) -> logging.Logger:
    """Return a logger below `apex_mp` that logs in the first process of a group only.

    If the level of `apex_mp` is DEBUG, it logs in every process.
    """
    log = logging.getLogger(name)
    log.addFilter(_is_for_this_process)
    return log


def _is_for_this_process(_: logging.LogRecord) -> bool:
    return is_first_process() or _PACKAGE.isEnabledFor(logging.DEBUG)


def is_first_process() -> bool:
    """Return whether this process is the first of its group, or alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"  # Set by launchers before there is a group.


class PrintHandler(logging.Handler):
    """Print the message alone, as apex did, unless the root logger shows it to the user.

    So a program that has configured logging shows each message once, in its own format.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print to the present sys.stdout; tests and notebooks replace it."""
        root = logging.getLogger().handlers if _PACKAGE.propagate else []
        if any(_shows(handler, record) for handler in root):
            return
        try:
            print(self.format(record))
        except Exception:  # As every handler: a closed sys.stdout must not end a training.
            self.handleError(record)


def _shows(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Return whether the user sees what a handler emits; files and pytest's caplog do not count."""
    if isinstance(handler, (logging.FileHandler, logging.NullHandler)):
        return False
    captures = isinstance(getattr(handler, "stream", None), io.StringIO)
    return not captures and record.levelno >= handler.level


if not _PACKAGE.handlers:  # Else the user has configured it before the import.
    _PACKAGE.addHandler(PrintHandler())
if _PACKAGE.level == logging.NOTSET:
    _PACKAGE.setLevel(logging.INFO)

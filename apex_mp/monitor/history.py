"""The record of a monitor: the last steps and samples of gradients, in memory and as JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apex_mp.grads.nonfinite import NonFinite
from apex_mp.monitor.exponents import Exponents, Sample

_FORMAT = 1
_SAMPLES = 100


@dataclasses.dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        number: Its number, from 1.
        scale: The loss scale of its gradients.
        skipped: Whether gradients held inf or NaN, so that nothing was stepped.
        grad_norm: l2 norm of all unscaled gradients before clipping; None if none was measured, or
            the step was skipped.
        clip: The factor by which clipping multiplied the gradients; None if nothing was measured.
        overflow: Which gradients held inf or NaN, the worst first.
    """

    number: int
    scale: float
    skipped: bool
    grad_norm: float | None = None
    clip: float | None = None
    overflow: tuple[NonFinite, ...] = ()


class History:
    """The last steps of a run.

    Args:
        length: How many steps are kept.

    Attributes:
        steps: The last steps, the oldest first.
        total: How many steps there were.
        skipped: How many of these were skipped.
        skips_in_a_row: How many of the last steps were skipped, one after the other.
        samples: The last samples of gradient exponents, the oldest first.
        origins: By number of the step, what `find_nonfinite` found, as text.
    """

    def __init__(self, length: int = 10_000) -> None:
        self.steps: collections.deque[Step] = collections.deque(maxlen=length)
        self.total = self.skipped = self.skips_in_a_row = 0
        self.samples: collections.deque[Sample] = collections.deque(maxlen=_SAMPLES)
        self.origins: dict[int, str] = {}

    def add(self, step: Step) -> None:
        """Append a step; the oldest one is dropped when there are more than `length`.

        Args:
            step: The newest step.
        """
        self.steps.append(step)
        self.total += 1
        self.skipped += step.skipped
        self.skips_in_a_row = self.skips_in_a_row + 1 if step.skipped else 0

    def overflows_by_name(self) -> dict[str, int]:
        """Return in how many of the kept steps each parameter overflowed, the most first.

        Parameters with equal numbers are in the order in which they were first reported.
        """
        counts = collections.Counter(
            name
            for step in self.steps
            for name in dict.fromkeys(found.name for found in step.overflow)
        )
        return dict(counts.most_common())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything as JSON.

        Args:
            path: The file's name; an existing file is replaced.
        """
        values = {
            "apex_mp_monitor": _FORMAT,
            "length": self.steps.maxlen,
            "total": self.total,
            "skipped": self.skipped,
            "skips_in_a_row": self.skips_in_a_row,
            "origins": [[number, text] for number, text in self.origins.items()],
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
            "steps": [dataclasses.asdict(step) for step in self.steps],
        }
        # Written to another file and renamed, so that a reader never sees half of it.
        target = Path(path)
        new = target.with_name(target.name + ".new")
        new.write_text(json.dumps(values, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(new, target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Return a history that `save` has written.

        Args:
            path: The file's name.

        Raises:
            ValueError: The file holds something else.
        """
        values = _read(path)
        try:
            return cls._of(values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{os.fspath(path)} is not what Monitor.save writes: {error!r}; it must be a file "
                "that nothing else has changed"
            ) from error

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> History:
        history = cls(values["length"])
        for step in values["steps"]:
            overflow = tuple(
                NonFinite(**{**found, "shape": tuple(found["shape"])}) for found in step["overflow"]
            )
            history.steps.append(Step(**{**step, "overflow": overflow}))
        history.samples.extend(_sample_of(sample) for sample in values["samples"])
        history.total, history.skipped = values["total"], values["skipped"]
        history.skips_in_a_row = values["skips_in_a_row"]
        history.origins = dict(values["origins"])
        return history


def _sample_of(values: dict[str, Any]) -> Sample:
    grads = [
        Exponents(
            **{
                **grad,
                "shape": tuple(grad["shape"]),
                "counts": {int(e): count for e, count in grad["counts"].items()},
            }
        )
        for grad in values["grads"]
    ]
    return Sample(values["step"], values["scale"], tuple(grads))


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is no JSON file: {error}") from error
    found = values.get("apex_mp_monitor") if isinstance(values, dict) else None
    if found != _FORMAT:
        raise ValueError(
            f"{os.fspath(path)} is not what Monitor.save writes: apex_mp_monitor is {found!r}; "
            f"it must be {_FORMAT}"
        )
    return values  # type: ignore[no-any-return]


def if_finite(value: float | None) -> float | None:
    """Return a number, or None for inf and NaN, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None

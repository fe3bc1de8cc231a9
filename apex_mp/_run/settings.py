"""The options of a run, and how they are passed to its child processes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

_VARIABLE = "APEX_MP_RUN"  # sitecustomize.py reads it, too
_CHILD = Path(__file__).resolve().parent / "child"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `python -m apex_mp run`.

    Attributes:
        era: See `install_as_apex`.
        force: See there.
        device: "cpu" to run code for a GPU on the CPU, or None.
        modernize: Supply what later versions removed.
        dtype: "bfloat16" to cast to it where a script casts to float16, or None.
        master_weights: Give masters to optimizers of 16-bit parameters: as of `use_master_weights`,
            or False.
        init_scale: The first scale of each GradScaler under `master_weights`, or None.
        strict: With `master_weights`: end with another status if a parameter had no master.
        apex: Install the name apex.
    """

    era: str = "2019-03"
    force: bool = False
    device: str | None = None
    modernize: bool = False
    dtype: str | None = None
    master_weights: bool | str = False
    init_scale: float | None = None
    strict: bool = False
    apex: bool = True

    def hand_to_children(self) -> None:
        """Write the settings to the environment, and put our sitecustomize before others."""
        os.environ[_VARIABLE] = json.dumps(dataclasses.asdict(self))
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(_CHILD), *(path for path in others if path and path != str(_CHILD))]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    @classmethod
    def from_parent(cls) -> Settings:
        """Read the settings of the parent process."""
        return cls(**json.loads(os.environ[_VARIABLE]))

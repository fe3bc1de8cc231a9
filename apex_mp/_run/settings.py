"""What a run is asked for, and how its child processes hear of it."""

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
        device: "cpu" to run on the CPU what asks for a GPU, or None.
        modernize: Supply what later versions took away.
        dtype: "bfloat16" to cast to that where a script casts to float16, or None.
    """

    era: str = "2019-03"
    force: bool = False
    device: str | None = None
    modernize: bool = False
    dtype: str | None = None

    def hand_to_children(self) -> None:
        """Write the settings into the environment, and our sitecustomize in front of others."""
        os.environ[_VARIABLE] = json.dumps(dataclasses.asdict(self))
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(_CHILD), *(path for path in others if path and path != str(_CHILD))]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    @classmethod
    def from_parent(cls) -> Settings:
        """Read what a parent process has handed down."""
        return cls(**json.loads(os.environ[_VARIABLE]))

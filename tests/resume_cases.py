"""Runs in two halves, the second in a process of its own: see test_resume.py.

As a program it runs all second halves: `python resume_cases.py FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from fp16_cases import INF
from way_runs import Run
from ways import WAYS, Way, train

from apex_mp.amp import _amp_state
from apex_mp.amp.casts import current as _current

# The first half ends with the counts of the scale in mid-way; the scale grows in the second.
FIRST = [None, None, INF, INF, None, None, None, None, INF, None]
SECOND = [None, None, None, INF, None, None, None]
CASES = {str(way): way for way in WAYS if way.has("torch's interface") and way.store != "host"}


def file_of(folder: Path, way: Way, part: str) -> Path:
    return folder / f"{way} {part}.pt"


def finish(run: Run) -> list[Any]:
    """Run the second half; return all numbers, and the scale."""
    scale = run.scale
    train(run, None, SECOND, first=len(FIRST))
    assert run.scale == scale  # It has grown, and backed off.
    if _current.handle is not None:
        _current.handle._deactivate()
    vars(_amp_state).update(vars(type(_amp_state)()))
    return [*run.numbers(), torch.tensor(scale)]


def first_half(way: Way, folder: Path) -> list[Any]:
    """Run a case, save it half-way, and go on; return the numbers at the end."""
    run = way.start(torch.device("cpu"))
    train(run, None, FIRST)
    states = {name: part.state_dict() for name, part in run.parts().items()}
    torch.save(states, file_of(folder, way, "first"))
    return finish(run)


def second_half(way: Way, folder: Path) -> None:
    """Load a case, run the rest of it, and save the numbers at the end."""
    run = way.start(torch.device("cpu"))
    run.load(torch.load(file_of(folder, way, "first"), weights_only=True))
    torch.save(finish(run), file_of(folder, way, "second"))


if __name__ == "__main__":
    for each in CASES.values():
        second_half(each, Path(sys.argv[1]))

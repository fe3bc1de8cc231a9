"""What multiproc has torchrun start: becomes the script, which then has its rank as an argument.

A program of its own, that imports nothing big: the script takes its place in the same process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def with_option(arguments: Sequence[str], name: str, value: str) -> list[str]:
    """Return arguments in which an option has a value, where it stands or at the end."""
    changed = [*arguments]
    for index, word in enumerate(changed):
        if word.startswith(f"{name}="):
            changed[index] = f"{name}={value}"
            return changed
        if word == name:
            changed[index + 1 : index + 2] = [value]
            return changed
    return [*changed, name, value]


def main() -> None:
    """Replace this process by the script."""
    rank = os.environ["RANK"]
    arguments = with_option(sys.argv[1:], "--world-size", os.environ["WORLD_SIZE"])
    arguments = with_option(arguments, "--rank", rank)
    if rank != "0":
        log = os.open(f"GPU_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(log, sys.stdout.fileno())
    os.execv(sys.executable, [sys.executable, "-u", *arguments])  # -u: as torchrun runs scripts.


if __name__ == "__main__":
    main()

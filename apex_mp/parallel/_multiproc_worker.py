"""The program that multiproc starts by torchrun: adds the rank to the arguments, runs the script.

It imports only small modules, because the script replaces it in the same process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def with_option(arguments: Sequence[str], name: str, value: str) -> list[str]:
    """Return arguments with an option set to a value, in its present place or at the end."""
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

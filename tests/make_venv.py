"""Make a virtual environment over the one that runs this: `python make_venv.py FOLDER`."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path


def main(folder: Path) -> None:
    """Make an environment that finds its own packages first, and then all of this one."""
    venv.create(folder, clear=True, with_pip=True)
    packages = Path(sysconfig.get_path("purelib"))
    # A plain path in a .pth file would leave out what the .pth files there add, editable packages.
    line = f"import site; site.addsitedir({str(packages)!r})\n"
    (folder / packages.relative_to(sys.prefix) / "project.pth").write_text(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

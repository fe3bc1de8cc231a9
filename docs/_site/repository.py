"""A Sphinx extension: pages from files in the root of the sources, and tables made by commands.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages. A line ``Table on the site, or by `python -m
MODULE`.`` becomes what the command prints, and `<!-- index: WORDS, MORE WORDS -->` entries
of the index, which a search finds first. A command on the page of a recipe is followed by
what it printed when benchmarks.recipes ran it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
from benchmarks import recipes  # noqa: E402

PAGES = {"index": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
TABLE = r"Table on the site, or by `(python -m .+)`\."
_NAMES = {file: f"{page}.md" for page, file in PAGES.items()}


def _from_docs(link: re.Match[str]) -> str:
    """Rewrite a link of a file in the root of the sources as seen from docs/."""
    target = link[1]
    if target.startswith("docs/"):
        return f"]({target.removeprefix('docs/')})"
    return f"]({_NAMES.get(target, f'../{target}')})"


def _output(found: re.Match[str]) -> str:
    """Return what a command prints."""
    command = [sys.executable, *found[1].split()[1:]]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def _index(found: re.Match[str]) -> str:
    """Return a directive that makes words of a search find this place."""
    entries = ", ".join(f"! {word}" for word in found[1].split(", "))
    return f"```{{index}} {entries}\n```"


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Bring the text of another file, which stands before the navigation, and tables."""
    if page in PAGES:
        path = ROOT / PAGES[page]
        app.env.note_dependency(str(path))
        text = re.sub(r"\]\((?!\w+:|#)([^)]+)\)", _from_docs, path.read_text("utf-8"))
        source[0] = f"{text}\n{source[0]}"
    if page.startswith("recipes/"):
        source[0] = recipes.with_outputs(page.removeprefix("recipes/"), source[0])
    source[0] = re.sub(r"^<!-- index: (.+) -->$", _index, source[0], flags=re.M)
    source[0] = re.sub(rf"^{TABLE}$", _output, source[0], flags=re.M)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}

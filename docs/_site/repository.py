"""A Sphinx extension: README.md, CONTRIBUTING.md and CHANGELOG.md are pages of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"index": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
_NAMES = {file: f"{page}.md" for page, file in PAGES.items()}


def _from_docs(link: re.Match[str]) -> str:
    """Rewrite a link of a file in the root of the sources as seen from docs/."""
    target = link[1]
    if target.startswith("docs/"):
        return f"]({target.removeprefix('docs/')})"
    return f"]({_NAMES.get(target, f'../{target}')})"


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the text of a file before that of its page, which has the navigation alone."""
    if page in PAGES:
        path = ROOT / PAGES[page]
        app.env.note_dependency(str(path))
        text = re.sub(r"\]\((?!\w+:|#)([^)]+)\)", _from_docs, path.read_text("utf-8"))
        source[0] = f"{text}\n{source[0]}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}

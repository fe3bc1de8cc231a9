"""Print the tables that the site shows in docs/apex_names.md: `python -m apex_mp._as_apex`."""

from __future__ import annotations

from apex_mp._as_apex.eras import ERAS, Era
from apex_mp._as_apex.inside import INSIDE
from apex_mp._as_apex.table import MISSING, MODULES


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _rows_of(module: str) -> list[str]:
    rows = [
        f"| `{module}` | {_code(names.split())} | `{origin}` |"
        for origin, names in MODULES[module].items()
    ]
    rows += [
        f"| `{module}` | `{name}` | not here: {instead} |"
        for name, instead in MISSING.get(module, {}).items()
    ]
    return rows or [f"| `{module}` | its modules | |"]


def _rows_of_era(era: Era) -> list[str]:
    """Rows like those of modules: names that an era has of another module, and that it lacks."""
    places = {**era.origins, **dict.fromkeys(sorted(era.absent), "")}
    rows: dict[tuple[str, str], list[str]] = {}
    for (module, name), origin in places.items():
        rows.setdefault((module, f"`{origin}`" if origin else "absent"), []).append(name)
    return [
        f'| `"{era.name}"` | `{module}` | {_code(names)} | {here} |'
        for (module, here), names in rows.items()
    ]


def tables() -> str:
    """Return the tables in Markdown: modules and names, eras, and the inside of amp."""
    lines = ["| module | names | here |", "|---|---|---|"]
    lines += [row for module in MODULES for row in _rows_of(module)]
    lines += [
        "",
        "| era | module | names that differ from those above | here |",
        "|---|---|---|---|",
    ]
    lines += [row for era in ERAS.values() for row in _rows_of_era(era)]
    lines += ["", "| object inside of amp | attributes | use | |", "|---|---|---|---|"]
    lines += [
        f"| `{row.owner}` | {_code(row.names.split())} | {row.use} | {row.note} |" for row in INSIDE
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())

"""Prints the policy as tables, which the site shows: `python -m apex_mp.amp.lists`."""

from __future__ import annotations

from collections.abc import Iterator

from apex_mp.amp.casts import policy
from apex_mp.amp.lists import tensor_overrides

_TITLES = {
    policy.LOW: "In low precision",
    policy.FLOAT: "In float32",
    policy.PROMOTE: "In the widest dtype among the arguments",
    policy.MATCH: "In the dtype of the tensor that is written",
    policy.REFUSE_FIRST: "An error for a low-precision tensor that is written",
    policy.REFUSE: "An error for low-precision arguments",
}


def tables() -> str:
    """Return one table a library in Markdown, with every function that has a rule."""
    return "\n".join(line for library in policy.LIBRARIES for line in _table(library))


def _table(library: str) -> Iterator[str]:
    owner = policy.LIBRARIES[library].MODULE
    yield f"### {'Recurrent layers and cells' if library == 'recurrent' else f'`{library}`'}"
    yield ""
    names: dict[str, list[str]] = {}
    for rule in policy.rules(allow_banned=False):
        if rule.library == library and hasattr(owner, rule.name):
            names.setdefault(rule.kind, []).append(rule.name)
    if library == "torch.Tensor":
        names[policy.MATCH] += tensor_overrides.IN_PLACE_OPERATORS
    yield "| | |"
    yield "|---|---|"
    for kind, title in _TITLES.items():
        if kind in names:
            yield f"| {title} | {', '.join(f'`{name}`' for name in sorted(names[kind]))} |"
    yield ""


if __name__ == "__main__":
    print(tables())

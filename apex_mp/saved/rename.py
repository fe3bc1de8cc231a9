"""Add and remove the prefixes that wrappers put before the keys of a state_dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

# DataParallel and DistributedDataParallel; FP16Model; network_to_half, and a Sequential around.
WRAPPER_PREFIXES = ("module.", "network.", "1.", "0.")

# Files from before PyTorch 0.4.1 lack it; torch's batch norms load them all the same.
_MAY_BE_MISSING = "num_batches_tracked"


def renamed(state_dict: Mapping[str, Any], wanted: Collection[str]) -> OrderedDict[str, Any]:
    """Return a state_dict whose keys have the prefixes of the wanted ones."""
    old, new = _prefixes_between([*state_dict], wanted)
    result = OrderedDict((new + key[len(old) :], value) for key, value in state_dict.items())
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        result._metadata = _renamed_paths(versions, old, new)  # type: ignore[attr-defined]
    return result


def _prefixes_between(saved: Collection[str], wanted: Collection[str]) -> tuple[str, str]:
    """Return the prefix to remove and the one to add."""
    ways = {
        (old, new): len({new + key[len(old) :] for key in saved} & {*wanted})
        for old in _common_prefixes(saved)
        for new in _common_prefixes(wanted)
    }
    exact = [way for way in ways if _all_fit(*way, saved, wanted)]
    if exact:
        old, new = exact[0]  # The others say the same with longer prefixes.
        if _says_position(old) and _says_position(new):
            raise ValueError(
                f"convert.rename: the keys begin with {old!r}, the model's with {new!r}; these "
                "may be wrappers or positions in a Sequential, so rename the keys that are meant"
            )
        return old, new
    some = [way for way, count in ways.items() if count]
    if len({_shortest(*way) for way in some}) > 1:
        said = " or ".join(
            f"with {new!r} for {old!r} ({ways[old, new]} of {len(wanted)})" for old, new in some
        )
        raise ValueError(
            f"convert.rename: the keys fit in several ways, {said}; rename those that are meant"
        )
    if not some:
        raise ValueError(
            f"convert.rename: with and without the prefixes {[*WRAPPER_PREFIXES]} no key is one of "
            f"the model's; there is {_first(saved)}, the model has {_first(wanted)}"
        )
    return some[0]


def _common_prefixes(keys: Collection[str]) -> list[str]:
    """Return "" and the wrappers' prefixes that all keys begin with, shortest first."""
    found = [""]
    while keys:
        longer = [
            found[-1] + word
            for word in WRAPPER_PREFIXES
            if all(key.startswith(found[-1] + word) for key in keys)
        ]
        if not longer:
            break
        found += longer
    return found


def _all_fit(old: str, new: str, saved: Collection[str], wanted: Collection[str]) -> bool:
    ours = {key for key in wanted if not key.endswith(_MAY_BE_MISSING)}
    theirs = {new + key[len(old) :] for key in saved}
    return ours <= theirs <= {*wanted}


def _says_position(prefix: str) -> bool:
    return any(word.isdigit() for word in prefix.split("."))


def _shortest(old: str, new: str) -> tuple[str, str]:
    """Return the two prefixes without their common end."""
    ours, theirs = old.split(".")[:-1], new.split(".")[:-1]
    while ours and theirs and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    return ".".join([*ours, ""]), ".".join([*theirs, ""])


def _renamed_paths(versions: Mapping[str, Any], old: str, new: str) -> OrderedDict[str, Any]:
    """Return versions of modules by renamed paths, which have no dot at their end."""
    return OrderedDict(
        ((new + f"{path}."[len(old) :]).rstrip("."), value)
        for path, value in versions.items()
        if f"{path}.".startswith(old) or not old
    )


def _first(keys: Collection[str]) -> str:
    return repr(next(iter(keys), "no key"))

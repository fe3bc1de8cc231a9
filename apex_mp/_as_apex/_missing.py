"""Stand-ins for names of apex that apex_mp lacks: they can be imported, but raise when used."""

from __future__ import annotations

from typing import Any


class _Absent(type):
    """Class of the stand-ins, so that `isinstance` and subclassing still work."""

    sentence: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(cls.sentence)


def stand_in(module: str, name: str, instead: str) -> type:
    """Return a class that raises a NotImplementedError when it is called or instantiated.

    Args:
        module: Where the name was.
        name: The class or function of apex.
        instead: What to use instead, beginning with a verb.
    """
    sentence = f"{module}.{name} is not in apex_mp; {instead}"
    return _Absent(name, (), {"__module__": module, "__doc__": sentence, "sentence": sentence})

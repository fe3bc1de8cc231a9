"""Functions that users give a precision to, by decorator or by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from apex_mp.amp import _current
from apex_mp.amp.casting import Caster, Function, is_plain_python

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Registration:
    """A function that a user has registered.

    Attributes:
        owner: Module, class or object that holds the function.
        name: The function's name there.
        cast: "to_low", "to_float" or "promote".
    """

    owner: Any
    name: str
    cast: str

    def wrap(self, function: Function, caster: Caster) -> Function:
        """Return the function as it is to be called."""
        return caster.wrap(
            function, self.name, self.cast, casts_inside=_casts_inside(function, self.cast)
        )


# In the order of registration. They stay: each init() applies them.
registrations: dict[tuple[int, str], Registration] = {}


def half_function(fn: F) -> F:
    """Make a function take its floating arguments in low precision, while casts are on.

    Args:
        fn: A function or method, a static or class method, or a C function; tensors in nested
            lists, tuples and dicts among its arguments are cast too. What a Python function
            calls is cast as ever; a C function is called as it is.
    """
    return _decorate(fn, "to_low")


def float_function(fn: F) -> F:
    """Make a function take its low-precision arguments in float32, while casts are on.

    What it calls is not cast.

    Args:
        fn: As for `half_function`.
    """
    return _decorate(fn, "to_float")


def promote_function(fn: F) -> F:
    """Make a function take arguments of several floating dtypes in the widest, while casts are on.

    Args:
        fn: As for `half_function`.
    """
    return _decorate(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Make `module.name` take its floating arguments in low precision, whatever the lists say.

    It holds for each `amp.init()` to come, and at once if casts are on.

    Args:
        module: Module, class or object that holds the function.
        name: The function's name there.

    Raises:
        ValueError: There is no such function.
    """
    _register(module, name, "to_low")


def register_float_function(module: Any, name: str) -> None:
    """Make `module.name` take its low-precision arguments in float32; see register_half_function.

    Args:
        module: Module, class or object that holds the function.
        name: The function's name there.

    Raises:
        ValueError: There is no such function.
    """
    _register(module, name, "to_float")


def register_promote_function(module: Any, name: str) -> None:
    """Make `module.name` take mixed arguments in the widest dtype; see register_half_function.

    Args:
        module: Module, class or object that holds the function.
        name: The function's name there.

    Raises:
        ValueError: There is no such function.
    """
    _register(module, name, "promote")


def _register(module: Any, name: str, cast: str) -> None:
    if not callable(getattr(module, name, None)):
        raise ValueError(f"No function named {name} in module {module}.")
    registration = Registration(module, name, cast)
    registrations.pop((id(module), name), None)
    registrations[id(module), name] = registration
    if _current.handle is not None:
        _current.handle._install(registration)


def _decorate(fn: F, cast: str) -> F:
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(_decorate(fn.__func__, cast))
    name = getattr(fn, "__name__", type(fn).__name__)
    casts_inside = _casts_inside(fn, cast)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _current.handle
        if handle is None or not handle._caster.is_on():
            return fn(*args, **kwargs)
        caster = handle._caster
        args, kwargs = getattr(caster, cast)(name, args, kwargs)
        if casts_inside:
            return fn(*args, **kwargs)
        return caster.call_uncast(fn, args, kwargs)

    return wrapper  # type: ignore[return-value]


def _casts_inside(fn: Any, cast: str) -> bool:
    return cast != "to_float" and is_plain_python(fn)

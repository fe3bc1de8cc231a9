"""Functions whose precision the user sets, by decorator or by name."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from apex_mp.amp.casts import current as _current
from apex_mp.amp.casts import output_buffers as _output_buffers
from apex_mp.amp.casts.casting import Caster, Function, call_with
from apex_mp.amp.casts.patching import Patches

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
        """Return a wrapper of the function that casts."""
        casts_inside = _casts_inside(function, self.cast)
        return caster.wrap(
            function, self.name, self.cast, casts_inside=casts_inside, is_registered=True
        )

    def install(self, patches: Patches, caster: Caster) -> None:
        """Replace the function.

        Raises:
            AttributeError, TypeError: It does not exist, or cannot be replaced.
        """
        patches.install(self.owner, self.name, functools.partial(self.wrap, caster=caster))


# In the order of registration. They stay: each init() applies them.
registrations: dict[tuple[int, str], Registration] = {}


def half_function(fn: F) -> F:
    """Make a function take its floating arguments in low precision, while casts are on.

    Args:
        fn: A function or method, a static or class method, or a C function; tensors in nested
            lists, tuples and dicts among its arguments are cast too. What a Python function or
            a module calls is cast as ever; C functions and torch's own are called as they are.

    Returns:
        A function that casts, and calls `fn`.

    Raises:
        TypeError: It is no function.
    """
    return _decorate(fn, "to_low")


def float_function(fn: F) -> F:
    """Make a function take its low-precision arguments in float32, while casts are on.

    What it calls is not cast.

    Args:
        fn: As for `half_function`.

    Returns:
        A function that casts, and calls `fn`.

    Raises:
        TypeError: It is no function.
    """
    return _decorate(fn, "to_float")


def promote_function(fn: F) -> F:
    """Make a function take arguments of several floating dtypes in the widest, while casts are on.

    Args:
        fn: As for `half_function`.

    Returns:
        A function that casts, and calls `fn`.

    Raises:
        TypeError: It is no function.
    """
    return _decorate(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Make `module.name` take its floating arguments in low precision, whatever the lists say.

    It holds for each `amp.init()` to come, and at once if casts are on.

    Args:
        module: Module, class or object that holds the function.
        name: The function's name there.

    Raises:
        ValueError: There is no such function, or nothing can take its place.
    """
    _register(module, name, "to_low")


def register_float_function(module: Any, name: str) -> None:
    """Make `module.name` take its low-precision arguments in float32; see register_half_function.

    Args:
        module: Module, class or object that holds the function.
        name: The function's name there.

    Raises:
        ValueError: There is no such function, or nothing can take its place.
    """
    _register(module, name, "to_float")


def register_promote_function(module: Any, name: str) -> None:
    """Make `module.name` take mixed arguments in the widest dtype; see register_half_function.

    Args:
        module: Module, class or object that holds the function.
        name: The function's name there.

    Raises:
        ValueError: There is no such function, or nothing can take its place.
    """
    _register(module, name, "promote")


def _register(module: Any, name: str, cast: str) -> None:
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"No function named {name} in module {module}.")
    if isinstance(function, type):  # isinstance() and subclasses need it as it is.
        raise ValueError(
            f"No function named {name} in module {module}. It is a class; register its methods."
        )
    registration = Registration(module, name, cast)
    handle = _current.handle
    try:
        if handle is not None:
            registration.install(handle._patches, handle._caster)
        else:  # Try it now: the line to blame is this one, not a later init().
            trial = Patches()
            trial.install(module, name, functools.partial(_decorate, cast=cast))
            trial.remove_all()
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"The function named {name} in module {module} cannot be replaced: {error}"
        ) from error
    registrations.pop((id(module), name), None)
    registrations[id(module), name] = registration


def _decorate(fn: F, cast: str) -> F:
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(_decorate(fn.__func__, cast))
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"{fn!r} is not a function or method; only those are given a precision")
    name = getattr(fn, "__name__", type(fn).__name__)
    casts_inside = _casts_inside(fn, cast)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _current.handle
        if handle is None:
            return fn(*args, **kwargs)
        caster = handle._caster
        if not caster.is_on():
            return caster.call_where_off(wrapper, fn, args, kwargs)
        given = args
        args, kwargs = getattr(caster, cast)(name, args, kwargs)
        call = call_with if casts_inside else caster.call_uncast
        result = call(fn, args, kwargs)
        _output_buffers.check(name, given, args, result)
        return result

    return wrapper  # type: ignore[return-value]


def _casts_inside(function: Any, cast: str) -> bool:
    """Return whether casts stay on for what a registered function calls.

    They stay on in the user's own Python functions and in modules, unless registered as float.
    They are off in C functions and in torch's Python functions, whose precision the user has set.
    """
    if cast == "to_float":
        return False
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return True  # Its apply, written in C since torch 2.14, calls the user's forward.
    function = getattr(function, "__func__", function)
    if not isinstance(function, (types.FunctionType, types.BuiltinFunctionType)):
        function = type(function).__call__
    module = (getattr(function, "__module__", None) or "") + "."
    return isinstance(function, types.FunctionType) and (
        not module.startswith("torch.")
        or module.startswith(("torch.nn.modules.", "torch.autograd."))
    )

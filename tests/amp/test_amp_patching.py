"""What amp puts in the place of torch's functions can be taken away without a trace."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest

from apex_mp.amp.casts.patching import Patches

pytestmark = pytest.mark.cpu_only


class Base:
    def method(self, x: int) -> tuple[str, int]:
        return type(self).__name__, x

    @classmethod
    def of_class(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x

    @staticmethod
    def static(x: int) -> tuple[str, int]:
        return "static", x

    absolute = abs  # Unlike a Python function, it is not bound.


class Derived(Base):
    pass


def tenfold(function: Callable[..., Any]) -> Callable[..., Any]:
    """Multiply the last argument by ten."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args[:-1], args[-1] * 10)

    return wrapper


# Each attribute, and how it is called.
CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a method": ("method", lambda: Derived().method(1)),
    "a method called on the class": ("method", lambda: Derived.method(Derived(), 1)),
    "a class method": ("of_class", lambda: Derived.of_class(1)),
    "a class method of an object": ("of_class", lambda: Derived().of_class(1)),
    "a static method": ("static", lambda: Derived.static(1)),
    "a static method of an object": ("static", lambda: Derived().static(1)),
    "a C function": ("absolute", lambda: Derived.absolute(1)),
    "a C function of an object": ("absolute", lambda: Derived().absolute(1)),
}


@pytest.mark.parametrize("owner", [Base, Derived], ids=["its own", "inherited"])
@pytest.mark.parametrize(("name", "call"), CALLS.values(), ids=[*CALLS])
def test_a_class_binds_ours_as_it_binds_the_original(
    name: str, call: Callable[[], Any], owner: type
) -> None:
    before, own = call(), dict(vars(owner))
    patches = Patches()
    patches.install(owner, name, tenfold)
    assert call() == ((before[0], 10) if isinstance(before, tuple) else 10)
    patches.remove_all()
    assert call() == before
    assert dict(vars(owner)) == own


def test_what_was_inherited_is_inherited_again() -> None:
    patches = Patches()
    patches.install(Derived, "method", tenfold)
    assert Base().method(1) == ("Base", 1)
    patches.remove_all()
    assert "method" not in vars(Derived)


def module_with(function: Callable[..., Any]) -> Any:
    module = types.ModuleType("module")
    module.function = function  # type: ignore[attr-defined]
    return module


def test_what_other_code_put_there_since_is_left_alone() -> None:
    module = module_with(abs)
    patches = Patches()
    patches.install(module, "function", tenfold)
    module.function = theirs = tenfold(module.function)
    patches.remove_all()
    assert module.function is theirs
    del module.function
    patches.remove_all()
    assert not hasattr(module, "function")


def test_the_last_replacement_is_the_first_to_go() -> None:
    class Recorded(types.ModuleType):
        order: tuple[str, ...] = ()

        def __setattr__(self, name: str, value: Any) -> None:
            Recorded.order += (name,)
            super().__setattr__(name, value)

    module = Recorded("module")
    module.a, module.b = abs, abs
    patches = Patches()
    patches.install(module, "a", tenfold)
    patches.install(module, "b", tenfold)
    patches.remove_all()
    assert Recorded.order == ("a", "b", "a", "b", "b", "a")


def test_replacements_can_be_suspended() -> None:
    module = module_with(abs)
    module.theirs = abs
    patches = Patches()
    for owner, name in ((module, "function"), (module, "theirs"), (Derived, "static")):
        patches.install(owner, name, tenfold)
    module.theirs = int
    for error in (None, KeyError):
        with contextlib.suppress(KeyError), patches.suspended():
            assert module.function is abs
            assert module.theirs is int
            assert "static" not in vars(Derived)
            if error:
                raise error
        assert module.function(-1) == 10
        assert module.theirs is int
        assert Derived().static(1) == ("static", 10)
    patches.remove_all()
    assert module.function is abs
    assert "static" not in vars(Derived)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(list, "append", TypeError), (types.ModuleType("empty"), "missing", AttributeError)],
)
def test_a_replacement_that_fails_leaves_nothing(
    owner: Any, name: str, error: type[Exception]
) -> None:
    patches = Patches()
    with pytest.raises(error):
        patches.install(owner, name, tenfold)
    assert (owner, name) not in patches
    patches.remove_all()

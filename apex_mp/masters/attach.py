"""More for an optimizer that exists: its class becomes a subclass of itself."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

# An addition stands behind torch's class in the order in which methods are looked up, so that calls
# of `super()` in an optimizer's own class do not meet it; to a type checker it is an optimizer.
if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object
_INTERNAL = {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__new__"}


class _Copied(NamedTuple):
    """What `copy` and `pickle` take of an optimizer: its own class's state, and what was added."""

    own: Any
    added: Any


class Addition(_Base):
    """What `attach` gives to an optimizer: attributes and methods before those of its own class.

    They call the own class's by `own(self, ThisAddition)`.
    """

    @classmethod
    def _members(cls, own: Any) -> dict[str, Any]:
        """Return more members of the class that is made of an optimizer's own class."""
        return {}

    def _copied(self) -> Any:
        """Return what `_restore` needs in a copy."""
        raise NotImplementedError

    def _restore(self, copied: Any) -> None:
        """Install the addition in a copy that has all else."""
        raise NotImplementedError


def class_with(addition: type[Addition], own: Any) -> Any:
    """Return a subclass of an optimizer's class that has an addition, with the same name.

    Its own class comes first among the bases, so Python can change the class of an object whatever
    these are (ABC, for example); what it shares with the addition is copied to be before it.
    """
    for known in own.__subclasses__():  # Weak references, so that classes are freed.
        if known.__dict__.get("_addition") is addition:
            return known
    members = {
        name: member
        for name, member in vars(addition).items()
        if name not in _INTERNAL and hasattr(own, name)
    }
    members.update({name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")})
    members.update(
        __new__=_new_own,
        __init__=_do_nothing,
        __reduce_ex__=_reduce,
        __setstate__=_set_state,
        _addition=addition,
        **addition._members(own),
    )
    bases = (own,) if issubclass(own, addition) else (own, addition)
    return types.new_class(own.__name__, bases, {}, lambda body: body.update(members))


def _new_own(cls: Any, *args: Any, **options: Any) -> Any:
    """Return an optimizer of the own class: `type(optimizer)(params)` has no addition."""
    return own_class(cls)(*args, **options)


def _do_nothing(optimizer: Any, *args: Any, **options: Any) -> None:
    """The constructor of what is complete."""


def _reduce(optimizer: Any, protocol: Any) -> Any:
    """Copy or pickle as the optimizer's own class does, with the addition."""
    cls = type(optimizer)
    reduced: Any = own(optimizer, cls._addition).__reduce_ex__(protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        raise TypeError(
            f"{cls.__name__}.__reduce__ returns no state, so a copy or pickle would lose the "
            "float32 masters; copy model.state_dict() and optimizer.state_dict()"
        )
    make, args, state, *items = reduced
    plain = tuple(own_class(cls) if each is cls else each for each in args)
    return _remake, (cls._addition, make, plain), _Copied(state, optimizer._copied()), *items


def _set_state(optimizer: Any, state: Any) -> None:
    of_own = own(optimizer, type(optimizer)._addition)
    if not isinstance(state, _Copied):  # load_state_dict calls this, too.
        of_own.__setstate__(state)
        return
    of_own.__setstate__(state.own)
    optimizer._restore(state.added)


def attach(optimizer: Any, addition: type[Addition]) -> None:
    """Give an optimizer an addition. It stays the same object, for schedulers that hold it."""
    optimizer.__class__ = class_with(addition, type(optimizer))


def own_class(cls: type) -> Any:
    """Return the class that an optimizer had before `attach`."""
    return cls.__bases__[0]


def own(optimizer: Any, addition: type) -> Any:
    """Return the optimizer with the members of its own class, as `super()` does."""
    for cls in type(optimizer).__mro__:
        if cls.__dict__.get("_addition") is addition:
            return super(cls, optimizer)
    raise TypeError(f"{type(optimizer).__name__} has no {addition.__name__}")


def _remake(addition: type[Addition], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    optimizer = make(*args)
    attach(optimizer, addition)
    return optimizer

"""The two orders of arguments of functions with weights: the shape second, or last."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from apex_mp.normalization._norms import is_shape


def either_order(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function `(input, weight, [bias,] normalized_shape, ...)` take the shape second too.

    The type of the second argument decides: a shape is a number or a sequence of numbers, a
    weight is a tensor.

    The result raises a TypeError if a weight is not a tensor, the shape is not a shape, or one is
    given twice.
    """
    names = [*inspect.signature(function).parameters]
    weights = names[1 : names.index("normalized_shape")]
    shape_second = ["input", "normalized_shape", *weights, *names[len(weights) + 2 :]]
    wish = " or ".join(f"({', '.join(each[: len(weights) + 2])})" for each in (shape_second, names))

    def refuse(name: str, said: str, wanted: str) -> NoReturn:
        raise TypeError(f"{function.__name__}: {name} is {said}; it must be {wanted}: {wish}")

    @functools.wraps(function)
    def taking_both(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > len(names):
            return function(*args)  # Python says how many there may be.
        order = shape_second if len(args) > 1 and is_shape(args[1]) else names
        given = dict(zip(order, args, strict=False))
        for name in given.keys() & kwargs.keys():
            refuse(name, "given by place and by name", "given once")
        given.update(kwargs)
        for name in weights:
            if name in given and not isinstance(given[name], Tensor):
                refuse(name, repr(given[name]), "a tensor")
        shape = given.get("normalized_shape", ())
        if not is_shape(shape):
            tensor = isinstance(shape, Tensor)
            said = f"a tensor of shape {[*shape.shape]}" if tensor else repr(shape)
            refuse("normalized_shape", said, "a number or a sequence of numbers")
        return function(**given)

    return taking_both

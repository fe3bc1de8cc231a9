"""Names that modules have dropped, by module; each is made when a script reads it."""

from __future__ import annotations

import collections.abc
import functools
import importlib
import inspect
import itertools
import math
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed, hub
from torch.utils import data

from apex_mp._run.modernize.notes import note
from apex_mp._run.replacements import Replacements

ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")


def _getargspec(func: Callable[..., Any]) -> ArgSpec:
    spec = inspect.getfullargspec(func)
    return ArgSpec(spec.args, spec.varargs, spec.varkw, spec.defaults)


def _in1d(ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False) -> Any:
    numpy = importlib.import_module("numpy")
    return numpy.isin(numpy.ravel(ar1), ar2, assume_unique=assume_unique, invert=invert)


def _asfarray(a: Any, dtype: Any = float) -> Any:
    return importlib.import_module("numpy").asarray(a, dtype=dtype)


def _rfft(
    input: Tensor,  # noqa: A002
    signal_ndim: int,
    normalized: bool = False,
    onesided: bool = True,
) -> Tensor:
    function = torch.fft.rfftn if onesided else torch.fft.fftn
    dims = [*range(-signal_ndim, 0)]
    return torch.view_as_real(function(input, dim=dims, norm=_norm(normalized)))


def _irfft(
    input: Tensor,  # noqa: A002
    signal_ndim: int,
    normalized: bool = False,
    onesided: bool = True,
    signal_sizes: Any = None,
) -> Tensor:
    given = torch.view_as_complex(input)
    dims, sizes = [*range(-signal_ndim, 0)], signal_sizes or None
    if onesided:
        real: Tensor = torch.fft.irfftn(given, s=sizes, dim=dims, norm=_norm(normalized))
    else:
        real = torch.fft.ifftn(given, s=sizes, dim=dims, norm=_norm(normalized)).real
    return real


def lstsq(input: Tensor, A: Tensor) -> tuple[Tensor, None]:  # noqa: A002, N803
    """Solve least squares; without the residuals and the QR that torch.lstsq also returned."""
    note("torch.lstsq", "is torch.linalg.lstsq")
    return torch.linalg.lstsq(A, input).solution, None


def symeig(
    input: Tensor,  # noqa: A002
    eigenvectors: bool = False,
    upper: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and vectors as torch.symeig did."""
    note("torch.symeig", "is torch.linalg.eigh")
    values, vectors = torch.linalg.eigh(input, UPLO="U" if upper else "L")
    return values, vectors if eigenvectors else vectors.new_empty(0)


def solve(input: Tensor, A: Tensor) -> tuple[Tensor, None]:  # noqa: A002, N803
    """Solve `A @ x = input`; without the factors that torch.solve also returned."""
    note("torch.solve", "is torch.linalg.solve")
    return torch.linalg.solve(A, input), None


def matrix_rank(input: Tensor, tol: Any = None, symmetric: bool = False) -> Tensor:  # noqa: A002
    """Return the rank as torch.matrix_rank did."""
    note("torch.matrix_rank", "is torch.linalg.matrix_rank")
    given = (input,) if tol is None else (input, tol)
    rank: Tensor = torch.linalg.matrix_rank(*given, hermitian=symmetric)
    return rank


def _zero_gradients(x: Any) -> None:
    for each in (x,) if isinstance(x, Tensor) else x:
        if each.grad is not None:
            each.grad.detach_().zero_()


def _norm(normalized: bool) -> str:
    return "ortho" if normalized else "backward"


# Names that numpy has dropped: those of Python's builtins, and three functions.
_BUILTINS: dict[str, Any] = {
    "bool": bool,
    "complex": complex,
    "float": float,
    "int": int,
    "long": int,
    "object": object,
    "str": str,
    "unicode": str,
    "in1d": _in1d,
    "asfarray": _asfarray,
    "asscalar": lambda a: a.item(),
    "math": math,
    "NINF": -math.inf,
    "NZERO": -0.0,
    "PZERO": 0.0,
    "issubclass_": issubclass,
    "msort": lambda a: importlib.import_module("numpy").sort(a, axis=0),
    "rank": lambda a: importlib.import_module("numpy").ndim(a),
}
_RENAMED = {
    "Inf": "inf",
    "Infinity": "inf",
    "NaN": "nan",
    "PINF": "inf",
    "alltrue": "all",
    "bytes0": "bytes_",
    "cfloat": "complex128",
    "clongfloat": "clongdouble",
    "complex_": "complex128",
    "int0": "intp",
    "longcomplex": "clongdouble",
    "longfloat": "longdouble",
    "object0": "object_",
    "singlecomplex": "complex64",
    "str0": "str_",
    "trapz": "trapezoid",
    "uint0": "uintp",
    "void0": "void",
    "bool8": "bool_",
    "cumproduct": "cumprod",
    "float_": "float64",
    "infty": "inf",
    "mat": "asmatrix",
    "product": "prod",
    "round_": "round",
    "row_stack": "vstack",
    "sometrue": "any",
    "string_": "bytes_",
    "unicode_": "str_",
}


def _backend() -> str:
    return distributed.get_backend() if distributed.is_initialized() else "undefined"


def _scalar_types() -> dict[str, list[Any]]:
    numpy = importlib.import_module("numpy")
    sizes = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}
    named = {kind: [getattr(numpy, f"{kind}{size}") for size in sizes[kind]] for kind in sizes}
    named["float"].append(numpy.longdouble)
    named["complex"] = [numpy.complex64, numpy.complex128, numpy.clongdouble]
    return {**named, "others": [bool, object, bytes, str, numpy.void]}


DROPPED: dict[str, dict[str, Callable[[], Any]]] = {
    "inspect": {"getargspec": lambda: _getargspec},
    # Abstract classes were in collections itself before Python 3.10.
    "collections": {
        name: functools.partial(getattr, collections.abc, name)
        for name in collections.abc.__all__
        if not hasattr(collections, name)
    },
    "time": {"clock": lambda: time.process_time},
    "fractions": {"gcd": lambda: math.gcd},
    "numpy": {
        "sctypes": _scalar_types,
        **{
            name: functools.partial(lambda value: value, value) for name, value in _BUILTINS.items()
        },
        **{
            old: functools.partial(lambda new: getattr(importlib.import_module("numpy"), new), new)
            for old, new in _RENAMED.items()
        },
    },
    "torch": {"rfft": lambda: _rfft, "irfft": lambda: _irfft, "gels": lambda: lstsq},
    "torch._utils": {"_accumulate": lambda: itertools.accumulate},
    "torch.autograd.gradcheck": {"zero_gradients": lambda: _zero_gradients},
    "torch.distributed": {
        "_initialized": distributed.is_initialized,
        "_backend": _backend,
        "dist_backend": lambda: distributed.Backend,
    },
    "torch.hub": {"_download_url_to_file": lambda: hub.download_url_to_file},
    "torch.utils.model_zoo": {
        "_download_url_to_file": lambda: hub.download_url_to_file,
        "HASH_REGEX": lambda: hub.HASH_REGEX,
        "urlparse": lambda: urllib.parse.urlparse,
        "urlopen": lambda: urllib.request.urlopen,
    },
    "torch.utils.data.dataloader": {
        "_use_shared_memory": lambda: data.get_worker_info() is not None
    },
}


# Functions that exist, but only raise an error that they were removed.
REPLACED: dict[str, Callable[..., Any]] = {
    "lstsq": lstsq,
    "matrix_rank": matrix_rank,
    "solve": solve,
    "symeig": symeig,
}


def supply(replacements: Replacements) -> None:
    """Add the names that are missing or only raise an error."""
    for module, names in DROPPED.items():
        if module != "numpy" or importlib.util.find_spec("numpy") is not None:
            _add(replacements, importlib.import_module(module), names)
    for name, function in REPLACED.items():
        replacements.set(torch, name, function)
        if hasattr(Tensor, name):
            replacements.set(Tensor, name, _method(function))


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


def _add(
    replacements: Replacements, module: ModuleType, names: Mapping[str, Callable[[], Any]]
) -> None:
    """Give a module more names, with a note when one is first read."""
    before = getattr(module, "__getattr__", None)

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name in names:
            note(f"{module.__name__}.{name}", "as it was")
            return names[name]()
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    replacements.set(module, "__getattr__", __getattr__)

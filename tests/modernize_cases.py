"""What scripts of 2018 to 2022 say that later versions removed, and what --modernize gives them."""

from __future__ import annotations

import argparse
import builtins
import collections
import functools
import importlib
import inspect
import io
import math
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from apex_mp._run.modernize import source

NP: Any = numpy


UINT8 = torch.tensor([1, 0, 1], dtype=torch.uint8)


X = torch.tensor([1.0, 2.0, 3.0])


PARAM = "p = nn.Parameter(torch.zeros(1, 2))\n"


IGNORED = torch.tensor([-100, -100])


TORCH: Any = torch


TIME: Any = time


DIST: Any = torch.distributed


XX = torch.arange(6.0).view(2, 3)


MASK2 = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.uint8)


SIGNAL = torch.arange(40.0).view(2, 4, 5).sin()


def said(text: str, **names: Any) -> Any:
    """Return `got` of a script, whose source `--modernize` compiles."""
    names = {"torch": torch, "nn": nn, **names}
    is_modern = hasattr(builtins, "_apex_mp")
    exec(source.compiled(text.encode(), "script.py") if is_modern else text, names)
    return names["got"]


def written(x: Tensor, index: Any, value: Any) -> Any:
    return said("x[index] = value\ngot = x.tolist()", x=x.clone(), index=index, value=value)


def close(x: Tensor) -> bool:
    return torch.allclose(x, SIGNAL, atol=1e-6)


def solved(function: Any) -> bool:
    a, x = torch.arange(6.0).view(3, 2).cos(), torch.ones(2, 1)
    return torch.allclose(function(a @ x, a)[0][:2], x, atol=1e-5)


def upper_of_symeig() -> bool:
    """It read the upper triangle, torch.linalg.eigh reads the lower."""
    values, vectors = TORCH.symeig(torch.tensor([[2.0, 1.0], [0.0, 2.0]]), eigenvectors=True)
    return torch.allclose(values, torch.tensor([1.0, 3.0])) and vectors.shape == (2, 2)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def zeroed(owner: str) -> list[float] | None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.ones(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    (model if owner == "model" else sgd).zero_grad()
    return None if model.weight.grad is None else model.weight.grad.flatten().tolist()


def pickled() -> Any:
    file = io.BytesIO()
    torch.save(argparse.Namespace(a=1), file)
    file.seek(0)
    return torch.load(file).a


def divided_out(number: int, by: Any) -> list[int]:
    out = torch.empty(2, dtype=torch.long)
    torch.div(torch.tensor([number, -number]), by, out=out)
    return out.tolist()


def divided_in_place(divide: Callable[[Any, int], Any]) -> list[int]:
    numbers = torch.tensor([7, -7])
    assert divide(numbers, 2) is numbers
    return numbers.tolist()


def scheduler(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(torch.optim.lr_scheduler, name)(optimizer(), *args, **kwargs)


class OldSampler(torch.utils.data.Sampler[int]):
    def __init__(self, data: list[int]) -> None:
        super().__init__(data)  # type: ignore[call-arg]
        self.data = data

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(len(self.data))))


UTILS: Any = importlib.import_module("torch._utils")


WAVE, WINDOW = torch.arange(64.0).sin(), torch.hann_window(16)


def back_and_forth() -> bool:
    pairs = torch.stft(WAVE, 16, window=WINDOW)
    return torch.allclose(torch.istft(pairs, 16, window=WINDOW), WAVE, atol=1e-5)


def without_gradients() -> list[float]:
    x = torch.ones(1, requires_grad=True)
    x.grad = torch.ones(1)
    module: Any = importlib.import_module("torch.autograd.gradcheck")
    module.zero_gradients(x)
    return x.grad.tolist()  # type: ignore[no-any-return]


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    NP.save(file, value)
    file.seek(0)
    return NP.load(file).tolist()


def text_sizes() -> bool:
    image, draw = (importlib.import_module(f"PIL.{name}") for name in ("Image", "ImageDraw"))
    drawing: Any = draw.Draw(image.new("RGB", (9, 9)))
    font = drawing.getfont()
    return bool(drawing.textsize("ab", font) == font.getsize("ab") > (0, 0))


def pixels() -> bytes:
    figure = importlib.import_module("matplotlib.figure").Figure((2, 2), dpi=1)
    canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.tostring_rgb()  # type: ignore[no-any-return]


# (what the script says, what it gets, a part of what is said on stderr)
CASES: list[tuple[Callable[[], Any], Any, str]] = [
    (lambda: importlib.import_module("torch._six").string_classes, (str, bytes), "torch._six"),
    (lambda: importlib.import_module("torch._six").inf, math.inf, "torch._six"),
    (pickled, 1, "weights_only=False"),
    (lambda: X.masked_fill(UINT8, 0).tolist(), [0, 2, 0], "masked_fill with a uint8"),
    (lambda: X.clone().masked_fill_(mask=UINT8, value=0).tolist(), [0, 2, 0], "masked_fill_"),
    (lambda: X.masked_select(UINT8).tolist(), [1, 3], "masked_select"),
    (lambda: torch.masked_select(X, UINT8).tolist(), [1, 3], "masked_select"),
    (lambda: torch.where(UINT8, X, -X).tolist(), [1, -2, 3], "where with a uint8"),
    (lambda: written(X, UINT8, 9), [9, 2, 9], "x[mask] = value with a uint8"),
    (lambda: written(X, UINT8, torch.tensor(9.0)), [9, 2, 9], "x[mask] = value"),
    (lambda: written(XX, MASK2, 9), [[9, 1, 9], [3, 9, 5]], "x[mask] = value"),
    (lambda: written(XX, MASK2[1, :2], 9), [[0, 1, 2], [9, 9, 9]], "x[mask] = value"),
    (lambda: written(XX, (slice(None), UINT8), 9), [[9, 1, 9], [9, 4, 9]], "x[mask] = value"),
    (lambda: written(XX, (0, UINT8), 9), [[9, 1, 9], [3, 4, 5]], "x[mask] = value"),
    (lambda: X.index_put((UINT8,), torch.tensor(9.0)).tolist(), [9, 2, 9], "index_put with"),
    (lambda: X.clone().index_put_([UINT8], torch.tensor(9.0)).tolist(), [9, 2, 9], "index_put_"),
    (lambda: torch.index_put(X, (UINT8,), torch.tensor(9.0)).tolist(), [9, 2, 9], "index_put"),
    (lambda: said("got = type(torch.tensor(2.0).data[0])"), float, "index 0 of a tensor of one"),
    (lambda: said("got = nn.Parameter(torch.tensor(2.0))[0].requires_grad"), True, "index 0"),
    (lambda: said("got = X.clone().copy_(X, async=True).tolist()", X=X), [1, 2, 3], "async=True"),
    (lambda: said(f"{PARAM}p.data.set_(torch.ones(3))\ngot = p.tolist()"), [1] * 3, "x.data.set_"),
    (lambda: said(f"{PARAM}p.data.t_()\ngot = [*p.shape]"), [2, 1], "x.data.t_"),
    *(
        (functools.partial(said, f"{PARAM}{line}\ngot = p.tolist()"), [[0.0, 5.0]], "a view of a")
        for line in (
            "p[0, 1] = 5",
            "p.view(-1)[1:] += 5",
            "v = p.view(2, 1)\nv[1] += torch.tensor(5.0)",
            "p[:, 1].fill_(5)",
            "v = p[0, 1]\nv += 5",
            "p[0].narrow(0, 1, 1).add_(2).add_(3)",
        )
    ),
    (lambda: numpy.dtype("int16") in NP.sctypes["int"], True, "numpy.sctypes"),
    (
        lambda: importlib.import_module("torch.utils.model_zoo")._download_url_to_file,
        torch.hub.download_url_to_file,
        "model_zoo._download_url_to_file",
    ),
    (lambda: (1 - (X > 1)).tolist(), [1, 0, 0], "- with a bool mask"),
    (lambda: ((X > 1) - (X > 2)).tolist(), [0, 1, 0], "- with a bool mask"),
    (lambda: (~UINT8).tolist(), [0, 1, 0], "~ of a uint8 mask"),
    (lambda: torch.full((1,), 3).dtype, torch.float32, "torch.full"),
    (lambda: divided_out(7, 2), [3, -3], "division of integers into an integer tensor"),
    (lambda: divided_out(7, torch.tensor(2)), [3, -3], "division of integers"),
    (lambda: divided_in_place(Tensor.div_), [3, -3], "division of integers"),
    (lambda: divided_in_place(operator.itruediv), [3, -3], "division of integers"),
    (lambda: inspect.getargspec(lambda a, *b: 0)[:2], (["a"], "b"), "inspect.getargspec"),  # type: ignore[attr-defined]
    (lambda: collections.Mapping, collections.abc.Mapping, "collections.Mapping"),  # type: ignore[attr-defined]
    (lambda: (NP.int, NP.float, NP.object), (int, float, object), "numpy.float"),
    (lambda: NP.float_, numpy.float64, "numpy.float_"),
    (lambda: NP.bool8, numpy.bool_, "numpy.bool8"),
    (lambda: NP.asscalar(numpy.array([3.5])), 3.5, "numpy.asscalar"),
    (lambda: NP.in1d([[1, 2], [3, 4]], [2, 3]).tolist(), [False, True, True, False], "numpy.in1d"),
    (lambda: NP.asfarray([1]).dtype, numpy.float64, "numpy.asfarray"),
    (
        lambda: abs(vars(time).get("clock", TIME.clock)() - time.process_time()) < 1,
        True,
        "time.clock",
    ),
    (lambda: importlib.import_module("fractions").gcd(12, 18), 6, "fractions.gcd"),
    (lambda: DIST._initialized, False, "torch.distributed._initialized"),
    (lambda: DIST._backend == DIST.dist_backend.NCCL, False, "torch.distributed.dist_backend"),
    (lambda: torch.utils.data.dataloader._use_shared_memory, False, "_use_shared_memory"),  # type: ignore[attr-defined]
    (lambda: TORCH.rfft(SIGNAL, 2).shape, (2, 4, 3, 2), "torch.rfft"),
    (
        lambda: torch.allclose(TORCH.rfft(SIGNAL, 1, True) * 5**0.5, TORCH.rfft(SIGNAL, 1)),
        True,
        "torch.rfft",
    ),
    (lambda: close(TORCH.irfft(TORCH.rfft(SIGNAL, 1), 1, signal_sizes=[5])), True, "torch.irfft"),
    (
        lambda: close(TORCH.irfft(TORCH.rfft(SIGNAL, 2, True, False), 2, True, False)),
        True,
        "torch.irfft",
    ),
    (lambda: solved(TORCH.gels), True, "torch.gels"),
    (lambda: solved(TORCH.lstsq), True, "torch.lstsq"),
    (lambda: TORCH.symeig(torch.eye(2) * 3)[0].tolist(), [3, 3], "torch.symeig"),
    (lambda: upper_of_symeig(), True, "torch.symeig"),
    (lambda: scheduler("ReduceLROnPlateau", verbose=True).patience, 10, "ReduceLROnPlateau"),
    (
        lambda: scheduler("ReduceLROnPlateau", "min", 0.1, 4, True, 0.5).threshold,
        0.5,
        "ReduceLROnPlateau",
    ),
    (lambda: scheduler("StepLR", 3, 0.1, -1, True).step_size, 3, "StepLR"),
    (lambda: zeroed("model"), [0.0], "zero_grad"),
    (lambda: zeroed("optimizer"), [0.0], "zero_grad"),
    (lambda: nn.CrossEntropyLoss()(torch.ones(2, 3), IGNORED).item(), 0.0, "cross_entropy"),
    (lambda: nn.functional.nll_loss(torch.ones(2, 3), IGNORED).item(), 0.0, "nll_loss"),
    (lambda: torch.ones(2, 3).t().view(-1).shape, (6,), "Tensor.view"),
    (lambda: [*OldSampler([1, 2])], [1, 0], "Sampler.__init__(data_source)"),
    (lambda: torch.stft(WAVE, 16, window=WINDOW).shape, (9, 17, 2), "torch.stft without"),
    (lambda: WAVE.stft(16, window=WINDOW).shape, (9, 17, 2), "torch.stft without"),
    (lambda: back_and_forth(), True, "torch.istft of pairs of numbers"),
    (lambda: TORCH.solve(torch.ones(2, 1), 2 * torch.eye(2))[0].tolist(), [[0.5]] * 2, "torch.so"),
    (lambda: torch.ones(2, 1).solve(2 * torch.eye(2))[0].tolist(), [[0.5]] * 2, "torch.solve"),  # type: ignore[operator]
    (lambda: int(TORCH.matrix_rank(torch.ones(3, 3))), 1, "torch.matrix_rank"),
    (lambda: [*UTILS._accumulate([1, 2])], [1, 3], "torch._utils._accumulate"),
    (lambda: without_gradients(), [0.0], "gradcheck.zero_gradients"),
    (lambda: NP.fromstring(b"\x01\x00", NP.int16).tolist(), [1], "numpy.fromstring of bytes"),
    (lambda: NP.array([[1], [1, 2]]).dtype, numpy.dtype(object), "rows of different lengths"),
    (lambda: NP.array([1.0], copy=False).tolist(), [1.0], "numpy.array(copy=False)"),
    (lambda: saved_and_loaded([[1], [1, 2]]), [[1], [1, 2]], "allow_pickle=True"),
    (lambda: (NP.math.pi, NP.NINF, NP.rank([[1]])), (math.pi, -math.inf, 2), "numpy.math"),
    (lambda: NP.trapz([1.0, 3.0]), 2.0, "numpy.trapz"),
    (lambda: text_sizes(), True, "textsize of PIL"),
    (lambda: pixels(), b"\xff" * 12, "tostring_rgb"),
    (lambda: importlib.import_module("PIL").PILLOW_VERSION[0].isdigit(), True, ""),
    (lambda: importlib.import_module("matplotlib.cm").get_cmap("jet").name, "jet", "get_cmap"),
    (lambda: iter(torch.utils.data.DataLoader([1])).next().item(), 1, "next()"),  # type: ignore[attr-defined, arg-type]
]

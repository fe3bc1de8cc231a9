"""Sample arguments for every function that the policy of amp names; a module that calls any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Runs(nn.Module):
    """Calls a function with itself, as the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Maker:
    """Makes tensors of numbers between 0.25 and 0.75; the n-th has the n-th dtype, then the last.

    Args:
        dtypes: The dtypes.
        device: Where the tensors lie.
    """

    def __init__(self, *dtypes: torch.dtype, device: str = "cpu") -> None:
        self._dtypes = [*dtypes]
        self._device = device

    def __call__(self, *shape: int) -> Tensor:
        dtype = self._dtypes.pop(0) if len(self._dtypes) > 1 else self._dtypes[0]
        return (torch.rand(shape, device=self._device) * 0.5 + 0.25).to(dtype)

    def ints(self, values: Any) -> Tensor:
        """Make a tensor of integers: classes, lengths."""
        return torch.tensor(values, device=self._device)

    def signs(self, *shape: int) -> Tensor:
        """Make a tensor of ones, for losses that take signs."""
        return torch.ones(shape, dtype=torch.long, device=self._device)


@dataclasses.dataclass
class Call:
    """Arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


Make = Callable[[Maker], Call]


def _unary(x: Maker) -> Call:
    return call(x(2, 3))


def _binary(x: Maker) -> Call:
    return call(x(2, 3), x(2, 3))


def _weights(size: int) -> Callable[[Maker], list[Tensor]]:
    def make(x: Maker) -> list[Tensor]:
        return [x(size * 2, 3), x(size * 2, 2), x(size * 2), x(size * 2)]

    return make


def _layer(gates: int, *, states: int = 1) -> tuple[Make, ...]:
    """Calls of a recurrent layer of torch._VF: padded, and packed."""
    weights = _weights(gates)

    def state(x: Maker) -> Any:
        made = tuple(x(1, 2, 2) for _ in range(states))
        return made if states > 1 else made[0]

    return (
        lambda x: call(x(3, 2, 3), state(x), weights(x), True, 1, 0.0, False, False, False),
        lambda x: call(
            x(3, 3), torch.tensor([2, 1]), state(x), weights(x), True, 1, 0.0, False, False
        ),
    )


def _cell(gates: int, *, states: int = 1) -> tuple[Make, ...]:
    weights = _weights(gates)
    if states == 1:
        return (lambda x: call(x(2, 3), x(2, 2), *weights(x)),)
    return (lambda x: call(x(2, 3), (x(2, 2), x(2, 2)), *weights(x)),)


# By the plain name: `add` stands for `__add__`, `__radd__` and `add_` too. Where a name has several
# operators behind it, there is a call for each that torch.autocast might treat differently.
CALLS: dict[str, tuple[Make, ...]] = {
    # Convolutions and matrix products
    "conv1d": (
        lambda x: call(x(1, 2, 4), x(3, 2, 2)),
        lambda x: call(x(1, 2, 4), x(3, 2, 3), x(3), padding="same"),
    ),
    "conv2d": (
        lambda x: call(x(1, 2, 4, 4), x(3, 2, 2, 2)),
        lambda x: call(x(1, 2, 4, 4), x(3, 2, 3, 3), x(3), padding="same"),
    ),
    "conv3d": (
        lambda x: call(x(1, 1, 3, 3, 3), x(2, 1, 2, 2, 2)),
        lambda x: call(x(1, 1, 3, 3, 3), x(2, 1, 3, 3, 3), x(2), padding="same"),
    ),
    "conv_transpose1d": (lambda x: call(x(1, 2, 4), x(2, 3, 2), x(3)),),
    "conv_transpose2d": (lambda x: call(x(1, 2, 3, 3), x(2, 3, 2, 2), x(3)),),
    "conv_transpose3d": (lambda x: call(x(1, 1, 2, 2, 2), x(1, 2, 2, 2, 2), x(2)),),
    "conv_tbc": (lambda x: call(x(4, 1, 2), x(2, 2, 3), x(3)),),
    "linear": (lambda x: call(x(2, 3), x(4, 3), x(4)), lambda x: call(x(2, 3), x(4, 3))),
    "prelu": (lambda x: call(x(2, 3), x(1)),),
    "addmm": (lambda x: call(x(2, 2), x(2, 3), x(3, 2)),),
    "addmv": (lambda x: call(x(2), x(2, 3), x(3)),),
    "addr": (lambda x: call(x(2, 3), x(2), x(3)),),
    "matmul": (
        lambda x: call(x(2, 3), x(3, 2)),
        lambda x: call(x(2, 2, 3), x(3, 2)),
        lambda x: call(x(3), x(3)),
        lambda x: call(x(2, 3), x(3)),
    ),
    "mm": (lambda x: call(x(2, 3), x(3, 2)),),
    "mv": (lambda x: call(x(2, 3), x(3)),),
    "bmm": (lambda x: call(x(2, 2, 3), x(2, 3, 2)),),
    "addbmm": (lambda x: call(x(2, 2), x(2, 2, 3), x(2, 3, 2)),),
    "baddbmm": (lambda x: call(x(2, 2, 2), x(2, 2, 3), x(2, 3, 2)),),
    # Pointwise
    **dict.fromkeys(
        ["acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2"], (_unary,)
    ),
    **dict.fromkeys(["reciprocal", "rsqrt", "sinh", "tan", "cpu"], (_unary,)),
    **dict.fromkeys(["softplus", "gelu"], (_unary,)),
    "pow": (lambda x: call(x(2, 3), 2), _binary),
    "softmin": (lambda x: call(x(2, 3), dim=1),),
    "softmax": (lambda x: call(x(2, 3), dim=1),),
    "log_softmax": (lambda x: call(x(2, 3), dim=1),),
    # Normalization
    "layer_norm": (
        lambda x: call(x(2, 3), (3,), x(3), x(3)),
        lambda x: call(x(2, 3), (3,)),
    ),
    "group_norm": (lambda x: call(x(2, 4, 3), 2, x(4), x(4)), lambda x: call(x(2, 4, 3), 2)),
    "local_response_norm": (lambda x: call(x(1, 4, 3), 2),),
    "normalize": (lambda x: call(x(2, 3)), lambda x: call(x(2, 3), p=1)),
    "cosine_similarity": (_binary,),
    "renorm": (lambda x: call(x(2, 3), 2, 0, 0.5),),
    # Resampling
    "interpolate": (
        lambda x: call(x(1, 2, 3, 3), scale_factor=2),
        lambda x: call(x(1, 2, 3, 3), size=5, mode="bilinear", align_corners=False),
        lambda x: call(x(1, 2, 3), size=5, mode="linear", align_corners=False),
        lambda x: call(x(1, 2, 3, 3), size=5, mode="bicubic", align_corners=False),
    ),
    "grid_sample": (lambda x: call(x(1, 2, 3, 3), x(1, 2, 2, 2), align_corners=False),),
    # Reductions
    "cumprod": (lambda x: call(x(2, 3), 1),),
    "cumsum": (lambda x: call(x(2, 3), 1),),
    "dist": (_binary,),
    "norm": (
        _unary,
        lambda x: call(x(2, 3), dim=1),
        lambda x: call(x(2, 3), 1),
        lambda x: call(x(2, 3), p="fro", dim=1, keepdim=True),
        lambda x: call(x(2, 3), 2, (0, 1)),
    ),
    **dict.fromkeys(["prod", "sum"], (_unary, lambda x: call(x(2, 3), dim=1, keepdim=True))),
    **dict.fromkeys(
        ["std", "var"],
        (
            _unary,
            lambda x: call(x(2, 3), 1),
            lambda x: call(x(2, 3), dim=(0, 1), keepdim=True),
            lambda x: call(x(2, 3), dim=1, correction=0),
            lambda x: call(x(2, 3), unbiased=False),
        ),
    ),
    # Losses
    "poisson_nll_loss": (_binary,),
    "cosine_embedding_loss": (lambda x: call(x(2, 3), x(2, 3), x.signs(2)),),
    "cross_entropy": (
        lambda x: call(x(2, 3), x.ints([0, 2])),
        lambda x: call(x(2, 3), x.ints([0, 2]), x(3), label_smoothing=0.1),
        lambda x: call(x(2, 3), x(2, 3)),
        lambda x: call(x(2, 3, 2), x.ints([[0, 2], [1, 1]])),
    ),
    "hinge_embedding_loss": (lambda x: call(x(2, 3), x.signs(2, 3)),),
    "kl_div": (lambda x: call(x(2, 3), x(2, 3), reduction="batchmean"),),
    **dict.fromkeys(["l1_loss", "mse_loss", "smooth_l1_loss"], (_binary,)),
    "margin_ranking_loss": (lambda x: call(x(3), x(3), x.signs(3)),),
    "multilabel_margin_loss": (lambda x: call(x(1, 4), x.ints([[3, 0, -1, 1]])),),
    "multilabel_soft_margin_loss": (_binary,),
    "multi_margin_loss": (lambda x: call(x(2, 3), x.ints([0, 2])),),
    "nll_loss": (
        lambda x: call(x(2, 3), x.ints([0, 2])),
        lambda x: call(x(2, 3, 2), x.ints([[0, 2], [1, 1]]), x(3)),
        lambda x: call(x(2, 3, 1, 2), x.ints([[[0, 2]], [[1, 1]]])),
    ),
    "binary_cross_entropy_with_logits": (
        _binary,
        lambda x: call(x(2, 3), x(2, 3), pos_weight=x(3)),
    ),
    "soft_margin_loss": (_binary,),
    "triplet_margin_loss": (lambda x: call(x(2, 3), x(2, 3), x(2, 3)),),
    "ctc_loss": (
        lambda x: call(x(4, 1, 3), x.ints([[1, 2]]), x.ints([4]), x.ints([2])),
        lambda x: call(x(4, 1, 3), x.ints([[1, 2]]), (4,), (2,)),
    ),
    "binary_cross_entropy": (_binary, lambda x: call(x(2, 3), x(2, 3), x(3))),
    # Arithmetic and comparison
    "bilinear": (lambda x: call(x(2, 3), x(2, 2), x(4, 3, 2), x(4)),),
    "addcdiv": (lambda x: call(x(2, 3), x(2, 3), x(2, 3)),),
    "addcmul": (lambda x: call(x(2, 3), x(2, 3), x(2, 3), value=2),),
    "atan2": (_binary,),
    "cross": (lambda x: call(x(2, 3), x(2, 3), dim=1),),
    **dict.fromkeys(["dot", "vdot"], (lambda x: call(x(3), x(3)),)),
    "div": (_binary, lambda x: call(x(2, 3), x(2, 3), rounding_mode="floor")),
    **dict.fromkeys(["add", "sub", "mul"], (_binary, lambda x: call(x(2, 3), x(3)))),
    **dict.fromkeys(["eq", "equal", "ge", "gt", "le", "lt", "ne"], (_binary,)),
    "cat": (lambda x: call([x(2, 3), x(2, 3)]), lambda x: call((x(2, 3), x(2, 3)), dim=1)),
    "stack": (lambda x: call([x(2, 3), x(2, 3)]),),
    # Recurrent layers and cells
    "lstm": _layer(4, states=2),
    "gru": _layer(3),
    **dict.fromkeys(["rnn_tanh", "rnn_relu"], _layer(1)),
    "lstm_cell": _cell(4, states=2),
    "gru_cell": _cell(3),
    **dict.fromkeys(["rnn_tanh_cell", "rnn_relu_cell"], _cell(1)),
}

_PLAIN_NAMES = {"truediv": "div", "rtruediv": "div", "rdiv": "div", "idiv": "div"}
_PLAIN_NAMES |= {"itruediv": "div", "radd": "add", "rmul": "mul", "rsub": "sub", "rpow": "pow"}
_PLAIN_NAMES |= {"iadd": "add", "imul": "mul", "isub": "sub", "ipow": "pow"}


def calls(name: str) -> list[Make]:
    """Return makers of arguments for a function, method or operator of a name."""
    plain = _PLAIN_NAMES.get(name.strip("_"), name.strip("_"))
    made = [*CALLS[plain]]
    # An operator takes two operands, and no option.
    return made[:1] if name.startswith("__") and plain in ("div", "add", "mul", "sub") else made


def floats_in(value: Any) -> list[Tensor]:
    """Return the floating tensors in the result of a call."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in floats_in(item)]
    return []

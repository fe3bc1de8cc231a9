"""What `amp.init()` casts, beyond single functions: layers, containers, results, cached weights."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tolerances import assert_same_bits
from torch import Tensor, nn
from torch.nn.utils import rnn as rnn_utils

from apex_mp import amp

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


def dtypes_in(value: Any) -> list[torch.dtype]:
    if isinstance(value, Tensor):
        return [value.dtype] if value.is_floating_point() else []
    if isinstance(value, dict):
        return dtypes_in([*value.values()])
    if isinstance(value, (list, tuple)):
        return [dtype for each in value for dtype in dtypes_in(each)]
    return []


Pair = collections.namedtuple("Pair", "first second")


PROMOTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "==": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack((a, b)),
    "dot": lambda a, b: torch.dot(a, b),
    "equal": lambda a, b: torch.equal(a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
}


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
low_dtypes = pytest.mark.parametrize("low", [F16, BF16], ids=["fp16", "bf16"])
HALF, SINGLE = torch.ones(2, dtype=F16), torch.ones(2)
CONTAINERS: dict[str, Any] = {
    "list": [HALF, SINGLE],
    "tuple": (HALF, SINGLE),
    "namedtuple": Pair(HALF, [SINGLE]),
    "dict": {"a": HALF, "b": {"c": (SINGLE, HALF)}},
    "ordered dict": collections.OrderedDict(b=HALF, a=SINGLE),
    "default dict": collections.defaultdict(list, a=[HALF], b=[SINGLE, None]),
    "parameters": [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=F16))],
    "mixed": [HALF, "text", None, 3, [SINGLE, {"x": HALF}], torch.arange(2)],
    "packed": rnn_utils.pack_sequence([HALF]),
}


def assert_close_to_float(actual: Tensor, expected: Tensor, low: torch.dtype) -> None:
    """Each number goes through at most ten roundings, of operands of the size of the largest."""
    bound = 10 * torch.finfo(low).eps / 2 * float(expected.detach().abs().max())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.0, atol=bound)


# Recurrent layers and cells.

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm-bidirectional-2-layers": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "lstm-batch-first-no-bias": lambda: nn.LSTM(3, 4, batch_first=True, bias=False),
    "lstm-projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "lstm-dropout": lambda: nn.LSTM(3, 4, 2, dropout=0.5),
    "gru": lambda: nn.GRU(3, 4),
    "gru-bidirectional": lambda: nn.GRU(3, 4, bidirectional=True),
    "rnn-tanh": lambda: nn.RNN(3, 4, 2, dropout=0.5),
    "rnn-relu": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}
CELLS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTMCell(3, 4),
    "gru": lambda: nn.GRUCell(3, 4),
    "rnn-tanh": lambda: nn.RNNCell(3, 4),
    "rnn-relu": lambda: nn.RNNCell(3, 4, nonlinearity="relu"),
}


def rounded(value: Any, low: torch.dtype) -> Any:
    """Return a module or tensors with every number rounded to low precision, as float32."""
    if isinstance(value, Tensor):
        return value.detach().to(low).float()
    if isinstance(value, tuple):
        return tuple(rounded(each, low) for each in value)
    copied = copy.deepcopy(value)
    for param in copied.parameters():
        param.data = rounded(param, low)
    return copied


def states_of(layer: nn.RNNBase, low: torch.dtype | None) -> Any:
    directions = 2 if layer.bidirectional else 1
    cell = torch.randn(layer.num_layers * directions, 2, 4).to(low or F32)
    if not isinstance(layer, nn.LSTM):
        return cell
    return (torch.randn(len(cell), 2, layer.proj_size or 4).to(low or F32), cell)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, rnn_utils.PackedSequence):
        return [value.data]
    return [value] if isinstance(value, Tensor) else [t for each in value for t in tensors_in(each)]


def packed(x: Tensor, layer: nn.RNNBase) -> Any:
    return rnn_utils.pack_padded_sequence(x, [5, 2], batch_first=layer.batch_first)


def backward_through(results: list[Tensor]) -> None:
    sum((t.float() * t.detach().float()).sum() for t in results).backward()


def assert_same_training(
    module: nn.Module, reference: nn.Module, run: Callable[[nn.Module], Any], low: torch.dtype
) -> None:
    """Compare results and gradients with those of a float32 module of rounded weights.

    In fp16 each result is the float32 one, rounded once: bit for bit. torch has bf16 kernels, which
    add up otherwise, and round between the steps of a sequence.
    """
    torch.manual_seed(1)
    amp.init(device_type="cpu", dtype=low)
    found = tensors_in(run(module))
    assert {t.dtype for t in found} == {low}
    backward_through(found)
    amp.casts.current.handle._deactivate()
    torch.manual_seed(1)
    expected = [t.to(low) for t in tensors_in(run(reference))]
    backward_through(expected)
    same = assert_same_bits if low is F16 else lambda a, b: assert_close_to_float(a, b, low)
    for one, other in zip(found, expected, strict=True):
        same(one.detach(), other.detach())
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None
        assert one.grad.dtype is F32
        same(one.grad, rounded(other.grad, low))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("input_is", "state_is", "low"),
    [
        ("float", "none", F16),
        ("half", "float", F16),
        ("packed", "half", F16),
        ("float", "half", BF16),
        ("packed", "none", BF16),
    ],
)
@pytest.mark.parametrize("name", LAYERS)
def test_a_recurrent_layer_runs_in_low_precision(
    name: str, state_is: str, input_is: str, low: torch.dtype
) -> None:
    layer = LAYERS[name]()
    if low is BF16 and layer.dropout:
        layer.dropout = 0.0  # Its random numbers are others in bf16.
    x = torch.randn((2, 5, 3) if layer.batch_first else (5, 2, 3))
    state = {"none": None, "float": states_of(layer, None), "half": states_of(layer, low)}[state_is]

    def run(module: nn.Module) -> Any:
        is_reference = module is reference
        given = rounded(x, low) if is_reference else x.to(low) if input_is == "half" else x
        start = rounded(state, low) if is_reference and state is not None else state
        return module(packed(given, layer) if input_is == "packed" else given, start)

    reference = rounded(layer, low)
    assert_same_training(layer, reference, run, low)


@low_dtypes
@pytest.mark.parametrize(
    ("input_dtype", "with_state"), [(F32, True), (None, False)], ids=["float", "half"]
)
@pytest.mark.parametrize("name", CELLS)
def test_a_recurrent_cell_runs_in_low_precision(
    name: str, input_dtype: torch.dtype | None, with_state: bool, low: torch.dtype
) -> None:
    cell = CELLS[name]()
    x, state = torch.randn(2, 3), torch.randn(2, 4)
    given_state = (state, state.to(low)) if name == "lstm" else state

    def run(module: nn.Module) -> Any:
        is_reference = module is reference
        given = rounded(x, low) if is_reference else x.to(input_dtype or low)
        start = rounded(given_state, low) if is_reference else given_state
        return module(given, start if with_state else None)

    reference = rounded(cell, low)
    assert_same_training(cell, reference, run, low)


# Attention.

ATTENTION: dict[str, tuple[Callable[[], nn.Module], torch.dtype | None]] = {
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), None),
    "encoder-layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), F32),
    "decoder-layer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), F32),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2
        ),
        F32,
    ),
}


@low_dtypes
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_layers_give_the_same_dtypes_in_training_and_evaluation(
    name: str, training: bool, grad: bool, low: torch.dtype
) -> None:
    """torch's fast path in evaluation knows nothing of casts: it is left."""
    make, dtype = ATTENTION[name]
    model = make().train(training)
    x = torch.randn(2, 5, 8)
    inputs = {"attention": (x, x, x), "decoder-layer": (x, x)}.get(name, (x,))
    expected = model(*inputs)
    amp.init(device_type="cpu", dtype=low)
    with torch.set_grad_enabled(grad):
        found = model(*inputs)
    if name == "attention":
        (found, weights), (expected, _) = found, expected
        assert weights.dtype is F32
    assert found.dtype is (dtype or low)
    assert_close_to_float(found, expected, low)


Q = torch.randn(2, 2, 5, 4)
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled_dot_product_attention": lambda q, k: F.scaled_dot_product_attention(q, k, k),
    "causal attention": lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
    "masked attention": lambda q, k: F.scaled_dot_product_attention(q, k, k, torch.zeros(5, 5)),
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k),
    "einsum of three": lambda q, k: torch.einsum("bhid,bhjd,bhjd->bhij", q, k, k),
    "matmul": lambda q, k: q @ k.transpose(2, 3),
}


@low_dtypes
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_without_a_layer_run_in_low_precision(name: str, low: torch.dtype) -> None:
    expected = PRODUCTS[name](Q, Q)
    amp.init(device_type="cpu", dtype=low)
    for q, k in [(Q, Q), (Q.to(low), Q.to(low)), (Q.to(low), Q), (Q, Q.to(low))]:
        found = PRODUCTS[name](q, k)
        assert found.dtype is low
        assert_close_to_float(found, expected, low)


# What stays, what is promoted.


def test_half_cpu_is_float32_as_it_always_was() -> None:
    """Whatever is logged or saved is float32; in 2019 so were bf16 and float64, which stay now."""
    amp.init(device_type="cpu")
    dtypes = [F16, BF16, F32, torch.float64]
    assert [torch.ones(1, dtype=d).cpu().dtype for d in dtypes] == [F32, BF16, F32, torch.float64]


OUT: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "exp": (lambda x, out: torch.exp(x, out=out), (3, 3)),
    "sum": (lambda x, out: torch.sum(x, 0, out=out), (3,)),
    "mv": (lambda x, out: torch.mv(x, x[0], out=out), (3,)),
    "mm": (lambda x, out: torch.mm(x, x, out=out), (3, 3)),
    "cat": (lambda x, out: torch.cat([x, x], out=out), (6, 3)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("dtype", [F16, F32], ids=["half", "float"])
@pytest.mark.parametrize("name", OUT)
def test_out_is_written_and_keeps_its_dtype(name: str, dtype: torch.dtype, verbose: bool) -> None:
    """In 2019 `out=` was cast, too: the result went into a copy."""
    function, shape = OUT[name]
    x = torch.rand(3, 3).to(dtype)
    expected = function(x, torch.empty(shape, dtype=dtype))
    amp.init(device_type="cpu", verbose=verbose)
    out = torch.empty(shape, dtype=dtype)
    assert function(x, out) is out
    torch.testing.assert_close(out, expected, rtol=2.0**-10, atol=0.0)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", PROMOTED)
def test_mixed_operands_are_computed_in_float32(name: str, swap: bool) -> None:
    """In fp16 a third equals a third; what is computed in float32 sees the difference."""
    half, single = torch.full((3,), 1 / 3, dtype=F16), torch.full((3,), 1 / 3)
    first, second = (single, half) if swap else (half, single)
    expected = PROMOTED[name](first.float(), second.float())
    amp.init(device_type="cpu")
    found = PROMOTED[name](first, second)
    if isinstance(found, bool):
        assert found is expected
    else:
        assert_same_bits(found, expected)


@pytest.mark.parametrize("how", ["positional", "keyword"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_come_back_as_what_they_are(name: str, how: str) -> None:
    """In 2019 parameters in a list, and namedtuples, were TypeErrors."""
    value = CONTAINERS[name]
    amp.init(device_type="cpu")
    for decorate, dtypes in [
        (amp.half_function, {F16}),
        (amp.float_function, {F32}),
        (amp.promote_function, {F32} if F32 in dtypes_in(value) else {F16}),
    ]:
        function = decorate(lambda x: x)
        found = function(value) if how == "positional" else function(x=value)
        assert type(found) is type(value)
        assert {*dtypes_in(found)} == dtypes
        if isinstance(value, dict):
            assert [*found] == [*value]
        if isinstance(value, collections.defaultdict):
            assert found.default_factory is list

"""apex_mp.normalization: each old name against torch's norms, in each pair of dtypes."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tolerances import NORM_TOLERANCES, assert_near
from torch import Tensor, nn
from torch.nn import functional

from apex_mp import amp
from apex_mp.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm_cuda,
)
from apex_mp.normalization import fused_layer_norm as norms
from apex_mp.optimizers import FusedAdam

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float64, torch.float32, *HALVES)
PAIRS = [*itertools.product(DTYPES, DTYPES)]
IDS = [f"{a}-{b}".replace("torch.", "") for a, b in PAIRS]
SHAPE = (3, 8)
MODULES = (FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm)


def tensors_of(input: torch.dtype, weights: torch.dtype, device: torch.device) -> list[Tensor]:  # noqa: A002
    """Return an input of 6 rows, a weight and a bias that require grad."""
    x, weight, bias = torch.randn(3, 2, *SHAPE), torch.rand(SHAPE) + 0.5, torch.randn(SHAPE)
    made = [x.to(input), weight.to(weights), bias.to(weights)]
    return [each.to(device).requires_grad_() for each in made]


def reference(tensors: Sequence[Tensor], eps: float) -> tuple[Tensor, list[Tensor]]:
    """Return the norm in float64, with a bias layer norm, and the tensors that it took."""
    wide = [each.detach().double().requires_grad_() for each in tensors]
    x, *weights = wide
    if len(tensors) == 2:
        return functional.rms_norm(x, SHAPE, *weights, eps), wide
    return functional.layer_norm(x, SHAPE, *weights, eps), wide


def near(actual: Tensor, expected: Tensor) -> None:
    assert_near(actual, expected, NORM_TOLERANCES[actual.dtype])


def check(output: Tensor, tensors: Sequence[Tensor], eps: float) -> None:
    """Compare an output, and the gradients of a backward from it, with float64.

    Gradients of a layer norm in half precision alone are torch's, to the bit.
    """
    wanted, wide = reference(tensors, eps)
    near(output, wanted)
    grad = torch.randn_like(output)
    output.backward(grad)
    if len(tensors) == 3 and {each.dtype for each in tensors} in ({half} for half in HALVES):
        theirs = [each.detach().clone().requires_grad_() for each in tensors]
        functional.layer_norm(theirs[0], SHAPE, *theirs[1:], eps).backward(grad)
        assert all(equal_grads(*pair) for pair in zip(tensors, theirs, strict=True))
        return
    wanted.backward(grad.double())
    for each, theirs in zip(tensors, wide, strict=True):
        assert each.grad is not None
        assert theirs.grad is not None
        assert each.grad.dtype is each.dtype
        near(each.grad, theirs.grad)


def equal_grads(one: Tensor, other: Tensor) -> bool:
    assert one.grad is not None
    assert other.grad is not None
    return torch.equal(one.grad, other.grad)


def filled(module: nn.Module, weights: Sequence[Tensor]) -> nn.Module:
    """Put parameters with the values and dtypes of `weights` into a module."""
    for name, value in zip(("weight", "bias"), weights, strict=False):
        setattr(module, name, nn.Parameter(value.detach().clone()))
    return module


# Values, gradients and dtypes


@pytest.mark.parametrize(("input", "weights"), PAIRS, ids=IDS)
@pytest.mark.parametrize("kind", MODULES)
def test_each_module_is_within_one_rounding_of_float64_in_each_pair_of_dtypes(
    kind: type[nn.Module],
    input: torch.dtype,  # noqa: A002
    weights: torch.dtype,
    device: torch.device,
) -> None:
    x, *values = tensors_of(input, weights, device)
    module = filled(kind(SHAPE, eps=1e-3), values[: 1 if "RMS" in kind.__name__ else 2])
    output = module(x)
    assert output.dtype is (weights if "Mixed" in kind.__name__ else input)
    check(output, [x, *module.parameters()], 1e-3)


@pytest.mark.parametrize(("input", "weights"), PAIRS, ids=IDS)
@pytest.mark.parametrize(
    ("function", "count", "mixed"),
    [
        (norms.fused_layer_norm_affine, 3, False),
        (norms.mixed_dtype_fused_layer_norm_affine, 3, True),
        (norms.FusedLayerNormAffineFunction.apply, 3, False),
        (norms.FusedLayerNormAffineMixedDtypesFunction.apply, 3, True),
        (norms.fused_rms_norm_affine, 2, False),
        (norms.mixed_dtype_fused_rms_norm_affine, 2, True),
        (norms.FusedRMSNormAffineFunction.apply, 2, False),
        (norms.FusedRMSNormAffineMixedDtypesFunction.apply, 2, True),
    ],
)
def test_each_function_with_weights_is_within_one_rounding_of_float64(
    function: Callable[..., Tensor],
    count: int,
    mixed: bool,
    input: torch.dtype,  # noqa: A002
    weights: torch.dtype,
    device: torch.device,
) -> None:
    tensors = tensors_of(input, weights, device)[:count]
    output = function(*tensors, SHAPE, 1e-3)
    assert output.dtype is (weights if mixed else input)
    check(output, tensors, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (norms.fused_layer_norm, functional.layer_norm),
        (norms.FusedLayerNormFunction.apply, functional.layer_norm),
        (FusedLayerNorm(SHAPE, 1e-3, elementwise_affine=False), functional.layer_norm),
        (norms.fused_rms_norm, functional.rms_norm),
        (norms.FusedRMSNormFunction.apply, functional.rms_norm),
        (FusedRMSNorm(SHAPE, 1e-3, elementwise_affine=False), functional.rms_norm),
    ],
)
def test_each_norm_without_weights_is_within_one_rounding_of_float64_with_torchs_gradients(
    function: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    (x, *_) = tensors_of(dtype, dtype, device)
    output = function(x) if isinstance(function, nn.Module) else function(x, SHAPE, 1e-3)
    assert output.dtype is dtype
    near(output, plain(x.detach().double(), SHAPE, eps=1e-3))
    theirs = x.detach().clone().requires_grad_()
    grad = torch.randn_like(output)
    output.backward(grad)
    plain(theirs, SHAPE, eps=1e-3).backward(grad)
    assert equal_grads(x, theirs)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)]
)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_module_is_torchs_to_the_bit_with_the_same_keys(
    ours: Any, theirs: Any, affine: bool, dtype: torch.dtype, device: torch.device
) -> None:
    mine, other = (kind(SHAPE, 1e-3, affine).to(device, dtype) for kind in (ours, theirs))
    assert isinstance(mine, theirs)
    other.load_state_dict(mine.state_dict())
    mine.load_state_dict(other.state_dict())
    x = torch.randn(2, *SHAPE, device=device, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, each in zip((mine, other), inputs, strict=True):
        module(each).square().sum().backward()
    assert torch.equal(mine(x), other(x))
    for a, b in zip([inputs[0], *mine.parameters()], [inputs[1], *other.parameters()], strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_gradient_can_be_differentiated(dtype: torch.dtype, device: torch.device) -> None:
    tensors = tensors_of(dtype, dtype, device)
    wanted, wide = reference(tensors, 1e-6)
    output = norms.fused_layer_norm_affine(*tensors, SHAPE)
    for result, of in ((output, tensors), (wanted, wide)):
        loss = (result * torch.arange(1, 9, device=device)).square().mean() / 8
        (grad,) = torch.autograd.grad(loss, of[0], create_graph=True)
        grad.square().sum().mul(4).backward()
    for each, theirs in zip(tensors[:2], wide[:2], strict=True):
        assert each.grad is not None
        assert theirs.grad is not None
        scale = theirs.grad.abs().max().item()
        bound = {torch.float16: 0.02, torch.float32: 1e-4, torch.float64: 1e-12}[dtype]
        assert (each.grad.double() - theirs.grad).abs().max().item() < bound * scale


# Inputs of all kinds


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_empty_batch_and_a_strided_input_are_taken(
    kind: Any, dtype: torch.dtype, device: torch.device
) -> None:
    module = kind(4).to(device)
    empty = torch.zeros(0, 4, device=device, dtype=dtype, requires_grad=True)
    module(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0, 4)
    assert module.weight.grad.tolist() == [0.0] * 4
    base = torch.randn(4, 6, 5, device=device).to(dtype)
    strided = base.permute(2, 1, 0)[:, ::2].detach().requires_grad_()
    plain = strided.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    for each in (strided, plain):
        module(each).float().square().sum().backward()
    assert torch.equal(module(strided), module(plain))
    assert strided.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(strided.grad, plain.grad)


@pytest.mark.slow
def test_a_module_is_printed_copied_pickled_and_compiled() -> None:
    for kind in MODULES:
        module: Any = kind(4, memory_efficient=True)
        assert repr(module).startswith(f"{kind.__name__}((4,), eps=1e-05, elementwise_affine=True")
        x = torch.randn(2, 4)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is kind
            assert other.memory_efficient is True
            assert torch.equal(other(x), module(x))
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        for each in (x, x.half()):
            assert compiled(each).dtype is module(each).dtype
            torch.testing.assert_close(compiled(each), module(each))
            torch._dynamo.reset()


# The arguments


def test_the_arguments_come_in_their_old_order_with_their_old_defaults() -> None:
    def parameters(of: Any) -> list[tuple[str, Any]]:
        empty = inspect.Parameter.empty
        signature = inspect.signature(of).parameters.values()
        return [(each.name, None if each.default is empty else each.default) for each in signature]

    for kind in (FusedLayerNorm, FusedRMSNorm):
        assert parameters(kind) == [
            ("normalized_shape", None), ("eps", 1e-5), ("elementwise_affine", True),
            ("memory_efficient", False),
        ]  # fmt: skip
    for mixed in (MixedFusedLayerNorm, MixedFusedRMSNorm):
        assert parameters(mixed)[:3] == [
            ("normalized_shape", None), ("eps", 1e-5), ("memory_efficient", False),
        ]  # fmt: skip
    for function in (norms.fused_layer_norm, norms.fused_rms_norm):
        assert parameters(function) == [
            ("input", None), ("normalized_shape", None), ("eps", 1e-6),
            ("memory_efficient", False),
        ]  # fmt: skip
    assert parameters(norms.fused_rms_norm_affine) == [
        ("input", None), ("weight", None), ("normalized_shape", None), ("eps", 1e-6),
        ("memory_efficient", False),
    ]  # fmt: skip


W, B = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 1.0, 0.0, 2.0])
EITHER_LAYER_NORM: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((W, B, (4,), 1e-3), {}),
    ((W, B, (4,), 1e-3, False), {}),
    (((4,), W, B, 1e-3), {}),
    (((4,), W, B, 1e-3, True), {}),
    ((4, W, B, 1e-3), {}),
    ((torch.Size([4]), W, B), {"eps": 1e-3}),
    ((W, B, [4]), {"eps": 1e-3, "memory_efficient": True}),
    ((W, B), {"normalized_shape": (4,), "eps": 1e-3}),
    (((4,),), {"weight": W, "bias": B, "eps": 1e-3}),
    (((4,), W), {"bias": B, "eps": 1e-3}),
    ((), {"weight": W, "bias": B, "normalized_shape": (4,), "eps": 1e-3}),
]


@pytest.mark.parametrize(("args", "kwargs"), EITHER_LAYER_NORM)
@pytest.mark.parametrize(
    "function", [norms.fused_layer_norm_affine, norms.mixed_dtype_fused_layer_norm_affine]
)
def test_the_shape_stands_before_the_weights_or_behind_them(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    x = torch.randn(2, 4)
    assert torch.equal(function(x, *args, **kwargs), functional.layer_norm(x, [4], W, B, 1e-3))
    if not args:
        assert torch.equal(function(input=x, **kwargs), function(x, **kwargs))


ORDERS = "(input, normalized_shape, weight, bias) or (input, weight, bias, normalized_shape)"


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((W, B, W), {}, "normalized_shape is a tensor of shape [4]; it must be a number or a "),
        ((W, (4,), B), {}, "bias is (4,); it must be a tensor"),
        ((None, None, (4,)), {}, "weight is None; it must be a tensor"),
        (((4,), W, None), {}, "bias is None; it must be a tensor"),
        (((4,), W, B), {"bias": B}, "bias is given by place and by name; it must be given once"),
        (((4,), W, B), {"normalized_shape": 4}, "normalized_shape is given by place and by name"),
        ((W, B, (4.0,)), {}, "normalized_shape is (4.0,); it must be a number or a sequence of"),
        ((W, B, "4"), {}, "normalized_shape is '4'; it must be a number or a sequence"),
        ((W, B, True), {}, "normalized_shape is True; it must be a number or a sequence"),
    ],
)
def test_arguments_in_no_order_are_refused_in_a_sentence(
    args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError) as refused:
        norms.fused_layer_norm_affine(torch.ones(2, 4), *args, **kwargs)
    assert str(refused.value).startswith(f"fused_layer_norm_affine: {said}")
    assert str(refused.value).endswith(f": {ORDERS}")


@pytest.mark.parametrize(
    ("input", "weight", "output"),
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, None, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.float64, None, torch.float64),
    ],
)
def test_the_manual_rms_norm_answers_in_half_precision_only_if_the_weight_is(
    input: torch.dtype,  # noqa: A002
    weight: torch.dtype | None,
    output: torch.dtype,
    device: torch.device,
) -> None:
    x, values, _ = tensors_of(input, weight or torch.float32, device)
    found = norms.manual_rms_norm(x, SHAPE, None if weight is None else values, 1e-3)
    assert found.dtype is output
    near(found, reference([x, values if weight else torch.ones_like(values)], 1e-3)[0])


# Casts


@pytest.mark.usefixtures("amp_off")
@pytest.mark.parametrize("kind", MODULES)
def test_where_amp_casts_a_norm_is_a_float32_function(kind: Any, device: torch.device) -> None:
    """As torch.nn.LayerNorm is by amp's lists."""
    module = kind(4).to(device)
    x = torch.randn(2, 4, device=device).half()
    handle = amp.init(device_type=device.type)
    assert module(x).dtype is torch.float32
    assert module(x.float()).dtype is torch.float32
    assert nn.LayerNorm(4).to(device)(x).dtype is torch.float32
    near(module(x), module(x.float()))
    assert kind(4).to(device).half()(x).dtype is torch.float32
    with handle._disable_casts():
        assert module(x).dtype is (torch.float32 if "Mixed" in kind.__name__ else torch.float16)
    handle._deactivate()
    assert module(x).dtype is (torch.float32 if "Mixed" in kind.__name__ else torch.float16)


class Model(nn.Module):
    """Linear layers with one norm of each kind between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in MODULES)
        self.norms = nn.ModuleList(kind(8) for kind in MODULES)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(layer(x)).to(x.dtype)
        output: Tensor = self.out(x)
        return output


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 8, generator=generator)
    return x.to(device), (x[:, :2] - x[:, 2:4]).to(device)


def float32_losses(device: torch.device, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    x, y = batch(device)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("amp_off")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_model_with_all_norms_trains_at_each_level_of_amp(
    level: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer: Any = FusedAdam(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    half = level in ("O2", "O3")
    for norm in model.norms:
        assert norm.weight.dtype is (torch.float16 if half else torch.float32)
    x, y = batch(device)
    losses = []
    for _ in range(30):
        loss = (model(x).float() - y).square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.35 * losses[0]
    wanted = float32_losses(device, 30)
    assert losses[-1] == pytest.approx(wanted[-1], rel=1e-4 if level == "O0" else 0.05)


# fused_layer_norm_cuda


@pytest.mark.parametrize("input", DTYPES)
@pytest.mark.parametrize("weights", DTYPES[1:])
@pytest.mark.parametrize("count", [3, 2])
def test_the_compiled_module_has_the_outputs_statistics_and_gradients_of_float64(
    count: int,
    input: torch.dtype,  # noqa: A002
    weights: torch.dtype,
    device: torch.device,
) -> None:
    tensors = tensors_of(input, weights, device)[:count]
    wanted, wide = reference(tensors, 1e-3)
    prefix = "" if count == 3 else "rms_"
    call = vars(fused_layer_norm_cuda)
    x, *values = (each.detach() for each in tensors)
    output, *stats = call[f"{prefix}forward_affine"](x, SHAPE, *values, 1e-3)
    mixed, *same = call[f"{prefix}forward_affine_mixed_dtypes"](x, SHAPE, *values, 1e-3)
    assert (output.dtype, mixed.dtype) == (input, weights)
    near(output, wanted)
    near(mixed, wanted)
    assert all(map(torch.equal, stats, same))
    rows = x.double().flatten(2)
    square = rows.var(2, correction=0) if count == 3 else rows.square().mean(2)
    near(stats[-1], (square + 1e-3).rsqrt().reshape(-1))
    if count == 3:
        near(stats[0], rows.mean(2).reshape(-1))
    for each in stats:
        assert each.shape == (6,)
        assert each.dtype is torch.promote_types(input, torch.float32)
    grad = torch.randn_like(output)
    wanted.backward(grad.double())
    grads = call[f"{prefix}backward_affine"](grad, *stats, x, SHAPE, *values, 1e-3)
    for mine, of, theirs in zip(grads, tensors, wide, strict=True):
        assert mine.dtype is of.dtype
        assert theirs.grad is not None
        near(mine, theirs.grad)

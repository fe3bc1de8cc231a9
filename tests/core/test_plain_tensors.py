"""Which kinds of parameters and gradients train where, and what refuses the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from plain_tensor_cases import FORMS, numbers_of
from torch import Tensor
from torch.nn import Parameter, UninitializedParameter
from torch.nn.parameter import is_lazy

from apex_mp import amp, fp16_utils, optimizers
from apex_mp.optimizers import FusedAdam, FusedSGD
from apex_mp.parallel import LARC

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

SCALE = 4.0
# For each parameter the gradient, given the loss scale; None: no gradient.
Grads: TypeAlias = list[Callable[[float], Tensor] | None]
Step: TypeAlias = Callable[[Grads], None]

NO_NUMBERS = {
    "DTensor": "is a DTensor, of which each process holds a part",
    "FakeTensor": "is a FakeTensor, whose numbers do not lie in its memory",
    "subclass": "is a Wrapper, whose numbers do not lie in its memory",
    "negative view": "is a negative view",
    "sparse": "is sparse (torch.sparse_coo); it must be dense",
    "meta": "is on meta, where there are no numbers",
    "uninitialized": "is not initialized; run the model once before",
}
REASONS = {
    **NO_NUMBERS,
    "complex": "is of dtype torch.complex64; it must be float16, bfloat16, float32 or float64",
    "float8": "is of dtype torch.float8_e4m3fn; it must be float16",
    "gaps": "has sizes [3, 4] and strides [8, 2]; its elements must lie in memory without gaps",
}


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.125, eps=0.5)


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.125, momentum=0.5)


def fused_adam(params: Any) -> Any:
    return FusedAdam(params, lr=0.125, eps=0.5, adam_w_mode=False)


def fused_sgd(params: Any) -> Any:
    return FusedSGD(params, lr=0.125, momentum=0.5)


def give(params: Any, grads: Grads, scale: float = 1.0) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad(scale)


# Places: each takes a way to make an optimizer and parameters, and returns a way to step.


def alone(make: Any, params: list[Any]) -> Step:
    optimizer = make(params)

    def step(grads: Grads) -> None:
        give(params, grads)
        optimizer.step()

    return step


def added(make: Any, params: list[Any]) -> Step:
    optimizer = make(params[:1])
    optimizer.add_param_group({"params": params[1]})

    def step(grads: Grads) -> None:
        give(params, grads)
        optimizer.step()

    return step


def masters(face: Any, *, later: bool = False) -> Callable[[Any, list[Any]], Step]:
    def place(make: Any, params: list[Any]) -> Step:
        optimizer = face(make(params[:1] if later else params), SCALE, verbose=False)
        if later:
            optimizer.add_param_group({"params": params[1:]})

        def step(grads: Grads) -> None:
            give(params, grads, optimizer.loss_scale)
            optimizer.step()

        return step

    return place


class Holder(torch.nn.Module):
    def __init__(self, params: list[Any]) -> None:
        super().__init__()
        self.good, self.odd = params


def block(enter: Any, optimizer: Any, params: list[Any], scale: float) -> Step:
    def step(grads: Grads) -> None:
        optimizer.zero_grad()
        with enter(torch.zeros((), requires_grad=True)):
            give(params, grads, scale)
        optimizer.step()

    return step


def scaled(make: Any, params: list[Any]) -> Step:
    optimizer, handle = make(params), amp.init(loss_scale=SCALE)
    return block(lambda loss: handle.scale_loss(loss, optimizer), optimizer, params, SCALE)


def wrapped(make: Any, params: list[Any]) -> Step:
    optimizer = amp.init(loss_scale=SCALE).wrap_optimizer(make(params))
    return block(optimizer.scale_loss, optimizer, params, SCALE)


def initialized(level: str, *, later: bool = False) -> Callable[[Any, list[Any]], Step]:
    def place(make: Any, params: list[Any]) -> Step:
        model = Holder([params[0], None if later else params[1]])
        optimizer = make(params[:1] if later else params)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
        if later:
            optimizer.add_param_group({"params": params[1:]})
        return block(lambda loss: amp.scale_loss(loss, optimizer), optimizer, params, SCALE)

    return place


OLD, NEW = fp16_utils.FP16_Optimizer, optimizers.FP16_Optimizer
FUSED = {"DTensor", "integer", "uninitialized"}
MASTERS = {"integer", "gaps"}
ALL = {"DTensor", "subclass", "negative view", "gaps", "complex", "integer", "uninitialized"}
CAST = {"gaps", "complex", "integer", "float8"}
F16, F32 = torch.float16, torch.float32
# For each place: who says it, how, around which optimizer, equal to which, of which dtype, and
# which kinds of parameters it takes.
PLACES: dict[str, tuple[str, Any, Any, Any, torch.dtype, set[str]]] = {
    "FusedAdam": ("FusedAdam", alone, fused_adam, adam, F32, FUSED),
    "FusedAdam.add_param_group": ("FusedAdam", added, fused_adam, adam, F32, FUSED),
    "FusedSGD": ("FusedSGD", alone, fused_sgd, sgd, F32, FUSED),
    "FusedSGD.add_param_group": ("FusedSGD", added, fused_sgd, sgd, F32, FUSED),
    "FP16_Optimizer(Adam)": ("FP16_Optimizer", masters(NEW), adam, adam, F16, MASTERS),
    "FP16_Optimizer(SGD) of fp16_utils": ("FP16_Optimizer", masters(OLD), sgd, sgd, F16, MASTERS),
    "FP16_Optimizer(Adam), float32": ("FP16_Optimizer", masters(NEW), adam, adam, F32, MASTERS),
    "FP16_Optimizer(Adam).add_param_group": (
        "FP16_Optimizer",
        masters(NEW, later=True),
        adam,
        adam,
        F16,
        MASTERS,
    ),
    "FP16_Optimizer(FusedAdam)": (
        "FusedAdam|FP16_Optimizer",
        masters(NEW),
        fused_adam,
        adam,
        F16,
        {"integer"},
    ),
    "FP16_Optimizer(FusedSGD).add_param_group": (
        "FusedSGD|FP16_Optimizer",
        masters(OLD, later=True),
        fused_sgd,
        sgd,
        F16,
        {"integer"},
    ),
    "amp.init and scale_loss, Adam": ("scale_loss", scaled, adam, adam, F32, ALL),
    "amp.init and scale_loss, SGD": ("scale_loss", scaled, sgd, sgd, F32, ALL),
    "amp.init and scale_loss, FusedAdam": ("FusedAdam", scaled, fused_adam, adam, F32, FUSED),
    "wrap_optimizer, SGD": ("scale_loss", wrapped, sgd, sgd, F32, ALL),
    "O1, Adam": ("scale_loss", initialized("O1"), adam, adam, F32, ALL),
    "O2, Adam": ("amp.initialize", initialized("O2"), adam, adam, F32, CAST),
    "O2, FusedSGD": (
        "FusedSGD|amp.initialize",
        initialized("O2"),
        fused_sgd,
        sgd,
        F32,
        {"integer"},
    ),
    "O2, SGD, add_param_group": (
        "amp.initialize|scale_loss",
        initialized("O2", later=True),
        sgd,
        sgd,
        F32,
        MASTERS | {"complex"},
    ),
    "O3, SGD": ("amp.initialize", initialized("O3"), sgd, sgd, F32, CAST),
}


def numbers(dtype: torch.dtype) -> Tensor:
    return torch.arange(1.0, 13.0).view(3, 4).to(dtype)


def make_parameter(kind: str, dtype: torch.dtype) -> Any:
    if kind == "uninitialized":
        return UninitializedParameter(dtype=dtype)
    return Parameter(FORMS[kind](numbers(dtype)), requires_grad=kind != "integer")


def gradient_of(param: Tensor, form: str) -> Callable[[float], Tensor] | None:
    """One in float16 and float32 exactly; of ones, if the form is that of the parameter."""
    if not param.requires_grad:
        return None
    if form == "as the parameter":
        return lambda scale: torch.full_like(param.detach(), 0.5 * scale)
    return lambda scale: FORMS[form](torch.full((3, 4), 0.5 * scale, dtype=param.dtype))


def train(step: Step, params: list[Any], form: str) -> None:
    for param in params:
        if is_lazy(param):
            param.materialize((3, 4))
            param.data.copy_(numbers(param.dtype))
    for _ in range(2):
        step([gradient_of(params[0], "plain"), gradient_of(params[1], form)])


def assert_trained_as_by(expected: Any, params: list[Any], kind: str) -> None:
    """Demand what a torch optimizer makes of plain parameters of float32, or complex64."""
    odd = numbers(F32) if kind == "uninitialized" else numbers_of(make_parameter(kind, F32))
    odd = odd.float() if kind == "float8" else odd
    twins = [Parameter(numbers(F32)), Parameter(odd, requires_grad=kind != "integer")]
    optimizer = expected(twins)
    for _ in range(2):
        grads = [gradient_of(twins[0], "plain"), gradient_of(twins[1], "as the parameter")]
        give(
            twins,
            [None if grad is None else (lambda s, g=grad: numbers_of(g(s))) for grad in grads],
        )
        optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(
            numbers_of(param), twin.detach().to(param.dtype), rtol=1e-3, atol=0
        )
    assert not torch.equal(twins[0].detach(), numbers(F32))


@pytest.fixture(autouse=True)
def process_group(request: pytest.FixtureRequest) -> None:
    """Have one process, if a test is about a DTensor."""
    if "DTensor" in request.node.callspec.params.values():
        request.getfixturevalue("one_process")


NAMES = {f"{lists}[{place}]" for lists in ("params", "grads") for place in ("0][1", "1][0")}
NAMES.add("the parameter odd")
# torch's optimizers have no parameters that are sparse.
PARAMETER_CASES = [
    (kind, place)
    for place, (caller, *_) in PLACES.items()
    for kind in ("plain", "integer", *REASONS)
    if (kind, caller) != ("sparse", "scale_loss")
]


@pytest.mark.parametrize(("kind", "place"), PARAMETER_CASES)
def test_a_parameter_trains_or_is_refused_before_anything_is_changed(kind: str, place: str) -> None:
    callers, setup, make, expected, dtype, takes = PLACES[place]
    good, odd = params = [Parameter(numbers(dtype)), make_parameter(kind, dtype)]
    made: list[Any] = []

    def remembering(params: Any) -> Any:
        made.append(make(params))
        return made[-1]

    if kind in {"plain", *takes}:
        train(setup(remembering, params), params, "as the parameter")
        assert_trained_as_by(expected, params, kind)
        return
    with pytest.raises((TypeError, RuntimeError)) as raised:
        train(setup(remembering, params), params, "as the parameter")
    caller, _, sentence = str(raised.value).partition(": ")
    name, found, _ = sentence.partition(f" {REASONS[kind]}")
    assert caller in callers.split("|")
    assert name in NAMES
    assert found
    assert torch.equal(good.detach(), numbers(dtype))
    for optimizer in made:
        listed = [param for group in optimizer.param_groups for param in group["params"]]
        if "scale_loss" in str(raised.value):
            continue
        assert (
            len(listed) == 1 if "add_param" in place else [*map(id, listed)] == [id(good), id(odd)]
        )
        assert not optimizer.state


GRAD_REASONS = {
    "FakeTensor": "is a FakeTensor|has the dispatch key Python",
    "subclass": "is a Wrapper|has the dispatch key Python",
    "DTensor": "is a DTensor|has the dispatch key Python",
    "sparse": "is sparse|does not support sparse gradients",
}
# What an optimizer of torch makes of the last three is its own affair.
GRAD_CASES = [
    (form, place)
    for place, (caller, *_) in PLACES.items()
    for form in ("plain", "negative view", "expanded", *GRAD_REASONS)
    if form not in ("subclass", "DTensor", "sparse")
    or not ("scale_loss" in caller or place == "O3, SGD")
]


@pytest.mark.parametrize(("form", "place"), GRAD_CASES)
def test_a_gradient_is_stepped_with_or_refused_before_anything_is_changed(
    form: str, place: str
) -> None:
    _, setup, make, expected, dtype, _ = PLACES[place]
    params = [Parameter(numbers(dtype)), Parameter(numbers(dtype))]
    step = setup(make, params)
    if form not in GRAD_REASONS:
        train(step, params, form)
        assert_trained_as_by(expected, params, "plain")
        return
    with pytest.raises((TypeError, RuntimeError), match=GRAD_REASONS[form]):
        train(step, params, form)
    for param in params:
        assert torch.equal(param.detach(), numbers(param.dtype))


@pytest.mark.parametrize("form", ["negative view", "expanded", "sparse"])
@pytest.mark.parametrize("make", [sgd, lambda params: torch.optim.SGD(params, 0.125)])
def test_losses_that_are_scaled_one_by_one_add_up(make: Any, form: str) -> None:
    params = [Parameter(numbers(F32)), Parameter(numbers(F32))]
    twin = Parameter(numbers(F32))
    optimizer, expected, handle = make(params), make([twin]), amp.init(loss_scale=SCALE)
    for _ in range(2):
        optimizer.zero_grad()
        for form_now in (form, "plain", form):
            fresh = FORMS[form_now](torch.full((3, 4), 0.5 * SCALE))
            with handle.scale_loss(torch.zeros((), requires_grad=True), optimizer):
                params[1].grad = fresh
        optimizer.step()
        twin.grad = torch.full((3, 4), 1.5)
        expected.step()
    assert torch.equal(params[1].detach(), twin.detach())


@pytest.mark.parametrize("form", ["plain", "negative view", "expanded", "complex", "sparse"])
def test_larc_scales_gradients_or_refuses_them_before_any_is_changed(form: str) -> None:
    kind = "complex" if form == "complex" else "plain"
    params = [Parameter(numbers(F32)), make_parameter(kind, F32)]
    twins = [Parameter(numbers(F32)), make_parameter(kind, F32)]
    optimizer, expected = LARC(sgd(params)), sgd(twins)
    for param in params:
        param.grad = torch.full_like(param.detach(), 4.0)
    params[1].grad = FORMS[form](torch.full((3, 4), 4.0))
    if form == "sparse":
        with pytest.raises(RuntimeError, match=r"LARC: grads\[0\]\[1\] is sparse"):
            optimizer.step()
        assert torch.equal(params[0].detach(), numbers(F32))
        assert bool((params[0].grad == 4.0).all())
        return
    optimizer.step()
    for twin, grad in zip(
        twins, (4.0, numbers_of(FORMS[form](torch.full((3, 4), 4.0)))), strict=True
    ):
        grad = grad if isinstance(grad, Tensor) else torch.full((3, 4), grad)
        rate = 0.02 * twin.detach().abs().square().sum().sqrt() / grad.abs().square().sum().sqrt()
        twin.grad = grad * (rate / 0.125).clamp(max=1.0)
    expected.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param.detach(), twin.detach())

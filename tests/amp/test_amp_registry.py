"""A function that a user has given a precision runs in it, whatever else amp would do."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from apex_mp import amp
from apex_mp.amp.casts import output_buffers as _output_buffers
from apex_mp.amp.casts import registry

H, S, D, B = torch.float16, torch.float32, torch.float64, torch.bfloat16

pytestmark = pytest.mark.usefixtures("amp_off")

DECORATORS = {
    "half": amp.half_function,
    "float": amp.float_function,
    "promote": amp.promote_function,
}
REGISTERS = {
    "half": amp.register_half_function,
    "float": amp.register_float_function,
    "promote": amp.register_promote_function,
}


@pytest.fixture
def init(device: torch.device) -> Callable[..., Any]:
    return functools.partial(amp.init, device_type=device.type)


@pytest.fixture
def h(device: torch.device) -> Tensor:
    return torch.tensor([[0.5, 1.0], [2.0, 4.0]], dtype=H, device=device)


@pytest.fixture
def s(device: torch.device) -> Tensor:
    return torch.tensor([[0.5, 1.0], [2.0, 4.0]], dtype=S, device=device)


def dtypes(*tensors: Tensor) -> list[torch.dtype]:
    """Something to decorate: the dtypes that it was given."""
    return [tensor.dtype for tensor in tensors]


def arguments(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Something to decorate: what it was given."""
    return args, kwargs


# Which dtypes a decorated function is called with, and which it gets.
GETS = [
    ("half", [S, S], [H, H]),
    ("half", [H, S], [H, H]),
    ("half", [D, B, torch.int64, torch.bool, torch.complex64], "the same"),
    ("float", [H, S], [S, S]),
    ("float", [D, B, torch.int64, torch.bool, torch.complex64], "the same"),
    ("promote", [H, S], [S, S]),
    ("promote", [H, H], "the same"),
    ("promote", [S, S], "the same"),
    ("promote", [H, torch.int64], "the same"),
    ("promote", [D, S], "the same"),
    ("promote", [H, S, D, torch.int64], [S, S, D, torch.int64]),
]


@pytest.mark.parametrize(("decorator", "given", "got"), GETS)
def test_a_decorated_function_gets_the_precision_it_asks_for(
    init: Any, device: torch.device, decorator: str, given: Any, got: Any
) -> None:
    init()
    tensors = [torch.ones(2, device=device).to(dtype) for dtype in given]
    assert DECORATORS[decorator](dtypes)(*tensors) == (given if got == "the same" else got)


@pytest.mark.parametrize("decorator", DECORATORS)
def test_without_casts_a_decorated_function_is_called_straight(
    init: Any, h: Tensor, s: Tensor, decorator: str
) -> None:
    function = DECORATORS[decorator](dtypes)

    def is_straight() -> bool:
        return function(h, s) == [H, S]

    assert is_straight()  # There is no handle.
    init(enabled=False)
    assert is_straight()
    handle = init()
    assert not is_straight()
    with handle._disable_casts():
        assert is_straight()
    with torch.autocast(h.device.type, enabled=False):
        assert is_straight()
    assert not is_straight()
    handle._deactivate()
    assert is_straight()


class Counter:
    """Something that is called, and has no name."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + 0

    def count(self, x: Tensor) -> torch.dtype:
        return x.dtype


# What is called without any name or Python of its own.
CALLABLES = {
    "a builtin": torch.neg,
    "a method of a type in C": torch.Tensor.neg,
    "an operator": torch.ops.aten.neg,
    "an overload": torch.ops.aten.neg.default,
    "a partial": functools.partial(torch.mul, other=-1),
    "a module": nn.Identity(),
    "an object": Counter(),
    "a lambda": lambda x: x + 0,
}


@pytest.mark.parametrize("function", CALLABLES.values(), ids=[*CALLABLES])
def test_whatever_can_be_called_can_be_decorated(
    init: Any, h: Tensor, s: Tensor, function: Any
) -> None:
    init()
    assert amp.half_function(function)(s).dtype is H
    assert amp.float_function(function)(h).dtype is S
    assert amp.promote_function(function)(h).dtype is H


@pytest.mark.parametrize("thing", [None, 3, nn.Linear])
def test_what_is_no_function_cannot_be_decorated(thing: Any) -> None:
    for decorator in DECORATORS.values():
        with pytest.raises(TypeError, match="is not a function or method"):
            decorator(thing)


# Among C functions are torch's own: they do what the user said, not what a list says.
@pytest.mark.parametrize("function", [torch.exp, torch.ops.aten.exp, F.softmax, torch.cumsum])
def test_a_c_function_is_called_uncast(init: Any, s: Tensor, function: Any) -> None:
    init()
    arguments = (s,) if "exp" in str(function) else (s, 0)
    assert function(*arguments).dtype is S
    assert amp.half_function(function)(*arguments).dtype is H


# Gradients.


class HalfProduct(torch.autograd.Function):
    seen: list[torch.dtype]

    @staticmethod
    @amp.half_function
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        HalfProduct.seen = [x.dtype, w.dtype]
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @amp.float_function
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        HalfProduct.seen += [grad.dtype, x.dtype, w.dtype]
        return grad @ w.t().float(), x.t().float() @ grad


def test_forward_and_backward_of_an_autograd_function_can_be_decorated(
    init: Any, s: Tensor
) -> None:
    handle = init()
    x, w = s.clone().requires_grad_(), s.clone().requires_grad_()
    HalfProduct.apply(x, w).sum().backward()
    assert HalfProduct.seen == [H, H, S, H, H]
    handle._deactivate()
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.dtype is w.grad.dtype is S
    assert x.grad.tolist() == [[1.5, 6.0], [1.5, 6.0]]
    assert w.grad.tolist() == [[2.5, 2.5], [5.0, 5.0]]


# Containers.


class Pair(NamedTuple):
    first: Any
    second: Any


class Bag(list[Any]):
    pass


def containers(x: Any) -> list[Any]:
    packed = nn.utils.rnn.PackedSequence(x, torch.ones(2, dtype=torch.int64))
    return [
        [x],
        (x, [x, (x,)]),
        Bag([x]),
        Pair(x, Pair([x], None)),
        packed,
        {"a": x, 2: [x]},
        collections.OrderedDict(b=x, a=x),
        [[], (), {}, {"a": []}, "word", None, 3, x],
    ]


def same(left: Any, right: Any) -> bool:
    """Whether two are equal in every type, key, order and dtype."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype is right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return [*left] == [*right] and same([*left.values()], [*right.values()])
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("which", range(8))
def test_tensors_in_containers_of_any_kind_are_cast(
    init: Any, h: Tensor, s: Tensor, which: int
) -> None:
    low, wide = containers(h)[which], containers(s)[which]
    init()
    assert same(amp.half_function(arguments)(wide, key=wide), ((low,), {"key": low}))
    assert same(amp.float_function(arguments)(low, key=low), ((wide,), {"key": wide}))
    mixed = amp.promote_function(arguments)(low, key=s)
    assert same(mixed, ((wide,), {"key": s}))
    assert same(low, containers(h)[which])  # The caller's own stays as it is.


# Owner, name, a call, and the result's dtype: by the lists, and as registered.
WINS: list[tuple[str, Any, str, Callable[[Tensor, Tensor], Tensor], torch.dtype, torch.dtype]] = [
    ("float", torch, "sigmoid", lambda h, s: torch.sigmoid(h), H, S),
    ("float", torch, "sigmoid", lambda h, s: nn.Sigmoid()(h), H, S),
    ("half", torch, "tanh", lambda h, s: torch.tanh(s), S, H),
    ("half", torch, "softmax", lambda h, s: torch.softmax(s, 0), S, H),
    ("half", torch, "exp", lambda h, s: torch.exp(input=s), S, H),
    ("half", torch, "einsum", lambda h, s: torch.einsum("ij,jk->ik", s, s), H, H),
    ("float", torch, "einsum", lambda h, s: torch.einsum("ij,jk->ik", h, h), H, S),
    ("half", F, "softmax", lambda h, s: F.softmax(s, dim=0), S, H),
    ("half", F, "layer_norm", lambda h, s: F.layer_norm(s, (2,)), S, H),
    ("float", F, "linear", lambda h, s: F.linear(h, s), H, S),
    ("float", torch, "matmul", lambda h, s: torch.matmul(h, h), H, S),
    ("promote", torch, "matmul", lambda h, s: torch.matmul(h, s), H, S),
    ("promote", torch, "matmul", lambda h, s: torch.matmul(h, h), H, H),
    ("promote", torch, "add", lambda h, s: torch.add(h, s), S, S),
    ("half", torch, "add", lambda h, s: torch.add(h, s), S, H),
    ("float", torch.Tensor, "__matmul__", lambda h, s: h @ h, H, S),
    ("float", torch.Tensor, "__add__", lambda h, s: h + h, H, S),
    ("half", torch.Tensor, "softmax", lambda h, s: s.softmax(0), S, H),
    ("half", torch.Tensor, "sum", lambda h, s: s.sum(), S, H),
    ("promote", torch.Tensor, "mm", lambda h, s: h.mm(s), H, S),
    ("half", torch.ops.aten, "neg", lambda h, s: torch.ops.aten.neg(s), S, H),
]
wins = pytest.mark.parametrize(
    ("register", "owner", "name", "call", "listed", "registered"),
    WINS,
    ids=[f"{row[0]} {row[2]} {index}" for index, row in enumerate(WINS)],
)


@wins
@pytest.mark.parametrize("when", ["before init", "after init"])
def test_a_registration_wins_over_the_lists(
    init: Any,
    h: Tensor,
    s: Tensor,
    when: str,
    register: str,
    owner: Any,
    name: str,
    call: Any,
    listed: torch.dtype,
    registered: torch.dtype,
) -> None:
    init()
    assert call(h, s).dtype is listed
    if when == "before init":
        amp.casts.current.handle._deactivate()
    REGISTERS[register](owner, name)
    if when == "before init":
        init()
    assert call(h, s).dtype is registered


def everything() -> dict[tuple[str, str], Any]:
    """All attributes of the libraries that amp replaces functions of."""
    owners = {"torch": torch, "F": F, "Tensor": torch.Tensor, "_VF": torch._VF, "nn": nn.Module}
    owners |= {"here": Here, "base": Here.__mro__[1]}
    return {(key, name): value for key, o in owners.items() for name, value in vars(o).items()}


class Base:
    def inherited(self, x: Tensor) -> tuple[type, torch.dtype]:
        return type(self), x.dtype

    @classmethod
    def of_class(cls, x: Tensor) -> tuple[type, torch.dtype]:
        return cls, x.dtype


class Here(Base):
    """A class of the user's own."""

    def method(self, x: Tensor) -> tuple[type, torch.dtype]:
        return type(self), x.dtype

    @staticmethod
    def static(x: Tensor) -> torch.dtype:
        return x.dtype


class Below(Here):
    pass


def test_deactivate_undoes_all_registrations(init: Any) -> None:
    before = everything()
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(Here, "inherited")
    assert everything() == before  # No trace before init().
    handle = init()
    amp.register_half_function(torch, "exp")
    amp.register_half_function(torch.Tensor, "sum")
    amp.register_half_function(Here, "static")
    amp.register_half_function(Here, "static")
    assert everything() != before
    handle._deactivate()
    after = everything()
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)


def test_a_registration_holds_for_each_init_to_come(init: Any, h: Tensor) -> None:
    amp.register_float_function(torch, "sigmoid")
    init(enabled=False)
    assert torch.sigmoid(h).dtype is H
    for _ in range(2):
        init()
        assert torch.sigmoid(h).dtype is S
    amp.casts.current.handle._deactivate()
    assert torch.sigmoid(h).dtype is H
    init()
    assert torch.sigmoid(h).dtype is S


@pytest.mark.parametrize("when", ["before init", "after init"])
def test_the_last_registration_of_a_name_counts(init: Any, s: Tensor, when: str) -> None:
    if when == "after init":
        init()
    for name in ("half", "float", "promote"):
        REGISTERS[name](Here, "static")
    amp.register_half_function(Here, "static")
    if when == "before init":
        init()
    assert Here.static(s) is H
    amp.register_float_function(Here, "static")
    assert Here.static(s) is S
    init()
    assert Here.static(s) is S


# Where a function can be registered: an owner, a name, and how it is called then.
OWNERS: dict[str, tuple[Any, str, Callable[[Tensor], Any], Any]] = {
    "a method": (Here, "method", lambda s: Here().method(s), (Here, H)),
    "a method of a class below": (Here, "method", lambda s: Below().method(s), (Below, H)),
    "an inherited method": (Here, "inherited", lambda s: Here().inherited(s), (Here, H)),
    "not the method above": (Here, "inherited", lambda s: Base().inherited(s), (Base, S)),
    "a class method": (Base, "of_class", lambda s: Below.of_class(s), (Below, H)),
    "an inherited class method": (Here, "of_class", lambda s: Below().of_class(s), (Below, H)),
    "a static method": (Here, "static", lambda s: Here.static(s), H),
    "a static method of an object": (Here, "static", lambda s: Here().static(s), H),
    "an inherited static method": (Below, "static", lambda s: Below().static(s), H),
}


@pytest.mark.parametrize(("owner", "name", "call", "expected"), OWNERS.values(), ids=[*OWNERS])
def test_methods_of_the_users_classes_can_be_registered(
    init: Any, s: Tensor, owner: Any, name: str, call: Any, expected: Any
) -> None:
    amp.register_half_function(owner, name)
    init()
    assert call(s) == expected


# What cannot be registered.


@pytest.mark.parametrize("register", REGISTERS.values())
@pytest.mark.parametrize("name", ["no_such_function", "pi"])
def test_a_wrong_name_is_named(init: Any, register: Any, name: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^No function named (.*) in module (.*)\.$") as info:
            register(torch, name)
        assert str(info.value) == f"No function named {name} in module {torch}."
        init()
    assert not registry.registrations


# torch.compile.


@pytest.mark.parametrize("register", [True, False], ids=["registered", "decorated"])
@pytest.mark.parametrize("returns", [True, False], ids=["a value", "nothing"])
def test_an_output_buffer_that_was_cast_gets_a_warning(
    init: Any, register: bool, returns: bool, h: Tensor, s: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_output_buffers, "_warned", set())

    def fill(values: Tensor, buffer: Tensor) -> Tensor | None:
        buffer.copy_(values.sum().expand_as(buffer))
        return values if returns else None

    owner = types.SimpleNamespace(fill=fill)
    if register:
        amp.register_float_function(owner, "fill")
    else:
        owner.fill = amp.float_function(fill)
    init()
    owner.fill(s, torch.zeros_like(s))  # Nothing is cast.
    with pytest.warns(
        RuntimeWarning, match="amp: fill got argument 1 in float32, cast from float16"
    ):
        owner.fill(s, torch.zeros_like(h))
    owner.fill(s, torch.zeros_like(h))


def test_a_function_that_only_reads_gets_no_warning(init: Any, h: Tensor, s: Tensor) -> None:
    init()
    for decorate in DECORATORS.values():
        decorate(lambda *values: sum(value.sum() for value in values))(h, s)


@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_decorated_and_registered_functions_compile(init: Any, h: Tensor, s: Tensor) -> None:
    @amp.half_function
    def low(x: Tensor) -> Tensor:
        return torch.mm(x, s)

    @amp.float_function
    def wide(x: Tensor) -> Tensor:
        return torch.mm(x, x)

    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return low(x), wide(x.half()), torch.tanh(x)

    amp.register_half_function(torch, "tanh")
    init()
    outputs = torch.compile(both, backend="eager", fullgraph=True)(s)
    assert dtypes(*outputs) == [H, S, H]

"""torch's own database of optimizers drives ours: its constructors, schedulers and wrong inputs.

torch's test_optim.py runs on `torch.testing._internal.common_optimizers`; what that asserts of
torch's optimizers is asserted here of ours.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from tolerances import TRAJECTORY_TOLERANCES, assert_near, assert_same_bits
from torch import Tensor, nn

from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedSGD

# torch's test tools need it. `make test` has it; a machine with a GPU may not.
pytest.importorskip("expecttest")

# The import forbids the whole process to set flags of torch.backends, which other tests do.
with mock.patch("torch.backends.disable_global_flags"):
    from torch.testing._internal.common_optimizers import optim_db

Make = Callable[..., torch.optim.Optimizer]
DATABASE = {info.optim_cls.__name__: info for info in optim_db}
TORCH_LR = 1e-3  # torch's default for SGD; ours has none, as in apex.


class Subject(NamedTuple):
    """An optimizer of ours beside the one of torch that it stands for.

    Attributes:
        make: Makes ours from parameters and torch's arguments.
        twin: torch's class.
        not_supported: Arguments that are refused, with a part of the error message.
    """

    make: Make
    twin: type[torch.optim.Optimizer]
    not_supported: dict[str, str]


NO_AMSGRAD = {"amsgrad": "does not support the AMSGrad variant"}
NO_MAXIMIZE = {"maximize": "unexpected keyword argument 'maximize'"}
NOT_OF_ADAGRAD = NO_MAXIMIZE | {
    name: f"unexpected keyword argument '{name}'"
    for name in ("lr_decay", "initial_accumulator_value")
}


def adamw(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return FusedAdam(params, **{"weight_decay": 1e-2, **kwargs})


def adam(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return FusedAdam(params, adam_w_mode=False, **kwargs)


def sgd(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return FusedSGD(params, **{"lr": TORCH_LR, **kwargs})


def around(make: Make) -> Make:
    return lambda *args, **kwargs: FP16_Optimizer(make(*args, **kwargs), verbose=False)


SUBJECTS = {
    "FusedAdam as AdamW": Subject(adamw, torch.optim.AdamW, NO_AMSGRAD),
    "FusedAdam as Adam": Subject(adam, torch.optim.Adam, NO_AMSGRAD),
    "FusedSGD as SGD": Subject(sgd, torch.optim.SGD, NO_MAXIMIZE),
    "FusedAdagrad as Adagrad": Subject(FusedAdagrad, torch.optim.Adagrad, NOT_OF_ADAGRAD),
    "FP16_Optimizer, FusedAdam": Subject(around(adamw), torch.optim.AdamW, NO_AMSGRAD),
    "FP16_Optimizer, FusedSGD": Subject(around(sgd), torch.optim.SGD, NO_MAXIMIZE),
    "FP16_Optimizer, AdamW": Subject(around(torch.optim.AdamW), torch.optim.AdamW, {}),
    "FP16_Optimizer, SGD": Subject(around(torch.optim.SGD), torch.optim.SGD, {}),
}


def inputs(subject: Subject) -> dict[str, dict[str, Any]]:
    """The arguments of torch's database, by its descriptions."""
    info = DATABASE[subject.twin.__name__]
    return {given.desc: given.kwargs for given in info.optim_inputs_func(device="cpu")}


def cases(*, supported: bool) -> list[Any]:
    return [
        pytest.param(subject, kwargs, id=f"{name}-{desc}")
        for name, subject in SUBJECTS.items()
        for desc, kwargs in inputs(subject).items()
        if supported == subject.not_supported.keys().isdisjoint(kwargs)
    ]


each_case = pytest.mark.parametrize(("subject", "kwargs"), cases(supported=True))
each_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=[*SUBJECTS])


def new_params(dtype: torch.dtype = torch.float32, device: Any = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in ((10, 5), (10,), ())
    ]


def give_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator)
        param.grad = grad.to(param.device, param.dtype)


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range
) -> list[Tensor]:
    """Take steps with the gradients of their numbers, and return the parameters."""
    for step in steps:
        give_grads(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


def own(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of one optimizer alone: a tensor as lr would be shared."""
    return copy.deepcopy(kwargs)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_steps_are_those_of_torch(
    subject: Subject, kwargs: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    ours, theirs = new_params(dtype, device), new_params(dtype, device)
    result = train(subject.make(ours, **own(kwargs)), ours, range(20))
    expected = train(subject.twin(theirs, **own(kwargs)), theirs, range(20))
    for one, other in zip(result, expected, strict=True):
        assert_near(one, other, TRAJECTORY_TOLERANCES[dtype])


@each_case
def test_groups_have_options_of_their_own(
    subject: Subject, kwargs: dict[str, Any], device: torch.device
) -> None:
    ours, theirs = new_params(device=device), new_params(device=device)

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:1]}, {"params": params[1:], "lr": 0.02, "weight_decay": 0.3}]

    result = train(subject.make(groups(ours), **own(kwargs)), ours, range(5))
    expected = train(subject.twin(groups(theirs), **own(kwargs)), theirs, range(5))
    for one, other in zip(result, expected, strict=True):
        assert_near(one, other, TRAJECTORY_TOLERANCES[torch.float32])


@pytest.mark.parametrize(("subject", "kwargs"), cases(supported=False))
def test_what_is_not_supported_is_refused(subject: Subject, kwargs: dict[str, Any]) -> None:
    reasons = [subject.not_supported[name] for name in kwargs if name in subject.not_supported]
    with pytest.raises((RuntimeError, TypeError), match=reasons[0]):
        subject.make(new_params(), **own(kwargs))


def ways() -> list[Any]:
    """Cases with the ways to another optimizer; an FP16_Optimizer refuses to be copied."""
    return [
        pytest.param(*case.values, way, id=f"{case.id}-{way}")
        for case in cases(supported=True)
        for way in ("state_dict", "file", "deepcopy", "pickle")
        if way in ("state_dict", "file") or not case.id.startswith("FP16_Optimizer")
    ]


@pytest.mark.parametrize(("subject", "kwargs", "way"), ways())
def test_another_optimizer_goes_on_to_the_bit(
    subject: Subject, kwargs: dict[str, Any], way: str, device: torch.device
) -> None:
    params = new_params(device=device)
    optimizer = subject.make(params, **own(kwargs))
    train(optimizer, params, range(3))
    if way == "deepcopy":
        other_params, other = copy.deepcopy((params, optimizer))
    elif way == "pickle":
        other_params, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        other_params = [nn.Parameter(param.detach().clone()) for param in params]
        other = subject.make(other_params, **own(kwargs))
        state = copy.deepcopy(optimizer.state_dict())  # torch's optimizers load tensors uncopied.
        if way == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        other.load_state_dict(state)
    expected = train(optimizer, params, range(3, 6))
    for one, exact in zip(train(other, other_params, range(3, 6)), expected, strict=True):
        assert_same_bits(one, exact)


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
@each_subject
def test_what_cannot_be_copied_says_so(subject: Subject, way: Callable[[Any], Any]) -> None:
    optimizer = subject.make(new_params())
    if isinstance(optimizer, FP16_Optimizer):
        with pytest.raises(RuntimeError, match="should be serialized using state_dict"):
            way(optimizer)
    else:
        way(optimizer)


def exchanges() -> list[Any]:
    """Cases with the directions in which state goes.

    An FP16_Optimizer's own holds masters too; that of FusedAdagrad lacks the steps that torch has.
    """
    return [
        pytest.param(*case.values, to_torch, id=f"{case.id}-{'to' if to_torch else 'from'} torch")
        for case in cases(supported=True)
        for to_torch in (True, False)
        if not (to_torch and case.id.startswith(("FP16_Optimizer", "FusedAdagrad")))
    ]


@pytest.mark.parametrize(("subject", "kwargs", "to_torch"), exchanges())
def test_state_is_exchanged_with_torch(
    subject: Subject, kwargs: dict[str, Any], to_torch: bool, device: torch.device
) -> None:
    first, second = (subject.make, subject.twin) if to_torch else (subject.twin, subject.make)
    params, reference = new_params(device=device), new_params(device=device)
    optimizer = first(params, **own(kwargs))
    train(optimizer, params, range(3))
    other_params = [nn.Parameter(param.detach().clone()) for param in params]
    other = second(other_params, **own(kwargs))
    other.load_state_dict(optimizer.state_dict())
    result = train(other, other_params, range(3, 6))
    expected = train(subject.twin(reference, **own(kwargs)), reference, range(6))
    for one, exact in zip(result, expected, strict=True):
        assert_near(one, exact, TRAJECTORY_TOLERANCES[torch.float32])


@each_case
def test_an_older_state_dict_can_be_loaded(
    subject: Subject, kwargs: dict[str, Any], device: torch.device
) -> None:
    """Groups of a state from before an option existed lack it."""
    params = new_params(device=device)
    optimizer = subject.make(params, **own(kwargs))
    train(optimizer, params, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    groups = state.get("optimizer_state_dict", state)["param_groups"]
    for group in groups:
        for option in {"maximize", "foreach", "fused", "differentiable", "capturable"} - {*kwargs}:
            group.pop(option, None)
    expected = train(optimizer, params, range(3, 6))
    other_params = new_params(device=device)
    other = subject.make(other_params, **own(kwargs))
    train(other, other_params, range(3))
    other.load_state_dict(state)
    for one, exact in zip(train(other, other_params, range(3, 6)), expected, strict=True):
        assert_same_bits(one, exact)


# Schedulers.


@each_subject
def test_schedulers_change_steps_as_in_torch(subject: Subject, device: torch.device) -> None:
    made = DATABASE[subject.twin.__name__].scheduler_inputs
    assert made
    for schedulers in made:
        results = []
        for make in (subject.make, subject.twin):
            params = new_params(device=device)
            optimizer = make(params, lr=0.1)
            running = [new(optimizer) for new in schedulers]
            for step in range(6):
                give_grads(params, step)
                optimizer.step()
                for scheduler in running:
                    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(1.0) if plateau else scheduler.step()
            results.append(params)
        for ours, theirs in zip(*results, strict=True):
            assert_near(ours, theirs, TRAJECTORY_TOLERANCES[torch.float32])


# Wrong input.

# torch's arguments that no fused optimizer of ours has.
NOT_OURS = {"foreach", "fused"}
# torch computes with betas that are tensors; ours reads them as numbers, so they may be mixed.
NOT_WRONG_HERE = "betas must be either both floats or both Tensors"


def error_inputs() -> list[Any]:
    found = []
    for name, subject in SUBJECTS.items():
        info = DATABASE[subject.twin.__name__]
        for number, error in enumerate(info.optim_error_inputs_func(device="cpu", dtype=None)):
            given = error.optimizer_error_input
            is_torchs_own = name.endswith(f", {subject.twin.__name__}")
            applies = NOT_OURS.isdisjoint(given.kwargs) and given.desc != NOT_WRONG_HERE
            if is_torchs_own or applies:
                found.append(pytest.param(subject, error, id=f"{name}-{number} {given.desc}"))
    return found


@pytest.mark.parametrize(("subject", "error"), error_inputs())
def test_what_torch_refuses_is_refused_with_the_same_type(subject: Subject, error: Any) -> None:
    given = error.optimizer_error_input
    params = new_params() if given.params is None else given.params
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            subject.make(params, **own(given.kwargs))
        return
    with pytest.raises((error.error_type, TypeError)):
        subject.make(params, **own(given.kwargs))


def test_betas_may_be_a_number_and_a_tensor(device: torch.device) -> None:
    results = []
    for betas in ((0.8, 0.9), (0.8, torch.tensor(0.9, dtype=torch.float64))):
        params = new_params(device=device)
        results.append(train(FusedAdam(params, betas=betas), params, range(3)))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


# What is around a step.


@each_subject
def test_hooks_of_a_step_are_called_once(subject: Subject, device: torch.device) -> None:
    params = new_params(device=device)
    optimizer = subject.make(params)
    called: list[str] = []
    before = optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train(optimizer, params, range(2))
    assert called == ["before", "after"] * 2
    before.remove()
    after.remove()
    train(optimizer, params, range(1))
    assert called == ["before", "after"] * 2


@each_subject
def test_hooks_see_and_may_replace_states(subject: Subject, device: torch.device) -> None:
    params = new_params(device=device)
    optimizer = subject.make(params)
    train(optimizer, params, range(2))
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("save"))
    optimizer.register_state_dict_post_hook(
        lambda _, state: {**state, "mark": called.append("saved")}
    )
    optimizer.register_load_state_dict_pre_hook(lambda _, state: called.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["save", "saved", "load", "loaded"]


@each_case
def test_a_closure_is_called_once_and_its_loss_returned(
    subject: Subject, kwargs: dict[str, Any], device: torch.device
) -> None:
    params = new_params(device=device)
    optimizer = subject.make(params, **own(kwargs))
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(sum((param**2).sum() for param in params))
        backward = getattr(optimizer, "backward", Tensor.backward)
        backward(losses[-1])
        return losses[-1]

    first, *_, last = (optimizer.step(closure) for _ in range(5))
    assert first is losses[0]
    assert len(losses) == 5
    assert last > first if "maximize" in kwargs else last < first


@each_case
def test_parameters_without_a_gradient_are_left_alone(
    subject: Subject, kwargs: dict[str, Any], device: torch.device
) -> None:
    params = new_params(device=device)
    optimizer = subject.make(params, **own(kwargs))
    before = [param.detach().clone() for param in params]
    optimizer.step()
    give_grads(params[:1], 0)
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    for param, old in zip(params[1:], before[1:], strict=True):
        assert_same_bits(param, old)
        assert param not in optimizer.state


@each_subject
def test_empty_parameters_and_gradients_of_zero_are_steps(
    subject: Subject, device: torch.device
) -> None:
    params = [nn.Parameter(torch.empty(0, 3, device=device)), *new_params(device=device)]
    optimizer = subject.make(params, weight_decay=0.0)
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param, old)


# Dtypes of state.


@each_case
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_state_of_low_precision_parameters_stays_float32(
    subject: Subject, kwargs: dict[str, Any], low: torch.dtype, device: torch.device
) -> None:
    """torch casts loaded state to the dtype of the parameter; ours keeps float32."""
    params = new_params(low, device)
    optimizer = subject.make(params, **own(kwargs))
    train(optimizer, params, range(3))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    kept = [
        value
        for group in optimizer.param_groups
        for param in group["params"]
        for value in optimizer.state.get(param, {}).values()
        if torch.is_tensor(value)
    ]
    assert {value.dtype for value in kept} <= {torch.float32}
    assert bool(kept) == (subject.twin is not torch.optim.SGD or "momentum" in kwargs)


@each_subject
def test_mixed_dtypes_step_as_each_alone(subject: Subject, device: torch.device) -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    together = [new_params(dtype, device) for dtype in dtypes]
    every = [param for params in together for param in params]
    optimizer = subject.make(every)
    for step in range(4):
        for params in together:
            give_grads(params, step)
        optimizer.step()
    for dtype, params in zip(dtypes, together, strict=True):
        alone = new_params(dtype, device)
        for one, exact in zip(params, train(subject.make(alone), alone, range(4)), strict=True):
            assert_same_bits(one, exact)


@each_subject
def test_complex_parameters_are_refused_by_name(subject: Subject) -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.complex64))]
    with pytest.raises(TypeError, match=r"params\[0\]\[1\] is of dtype torch.complex64"):
        subject.make(params)

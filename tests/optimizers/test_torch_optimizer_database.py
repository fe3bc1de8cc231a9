"""torch's own database of optimizers drives ours: its constructors, schedulers and wrong inputs.

torch's test_optim.py runs on `torch.testing._internal.common_optimizers`; what that asserts of
torch's optimizers is asserted here of ours.
"""

from __future__ import annotations

import copy
import inspect
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
from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedAdamW, FusedSGD

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
    "FusedAdamW": Subject(FusedAdamW, torch.optim.AdamW, NO_AMSGRAD),
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


def test_fused_adamw_has_the_arguments_and_defaults_of_torch() -> None:
    ours, torchs = (inspect.signature(kind).parameters for kind in (FusedAdamW, torch.optim.AdamW))
    assert [*ours][: len(torchs)] == [*torchs]
    for name, parameter in torchs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
    with pytest.raises(RuntimeError, match="FusedAdamW: differentiable is True; it must be False"):
        FusedAdamW(new_params(), differentiable=True)


def test_fused_adamw_goes_on_from_a_checkpoint_of_torch_and_back() -> None:
    ours, torchs = new_params(), new_params()
    fused, adamw = FusedAdamW(ours), torch.optim.AdamW(torchs)
    for step in range(4):
        give_grads(ours, step)
        give_grads(torchs, step)
        fused.step()
        adamw.step()
        fused_state, adamw_state = fused.state_dict(), copy.deepcopy(adamw.state_dict())
        fused.load_state_dict(adamw_state)
        adamw.load_state_dict(fused_state)
    for param, expected in zip(ours, torchs, strict=True):
        assert_near(param.detach(), expected.detach(), TRAJECTORY_TOLERANCES[torch.float32])

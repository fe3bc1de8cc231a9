"""Arguments and checkpoints of the fused optimizers: their own, torch's, apex's, and wrong ones."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    F64,
    NAMES,
    Unchanged,
    assert_same_state,
    copies_of,
    give_grads,
    train,
)
from rule_cases import (
    SMALL,
    SUBJECTS,
    Subject,
    Wrong,
    each_subject,
    each_wrong,
    make_params,
)
from tolerances import assert_same_bits
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdagrad, FusedAdam, FusedMixedPrecisionLamb, FusedSGD

how = {"missing": lambda step, index: index == 2 or (step + index) % 5 == 0}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(*pairs: tuple[Any, list[Parameter]]) -> None:
    """Take the same steps with each optimizer and its parameters; each has a gradient by then."""
    for optimizer, params in pairs:
        train(optimizer, params, range(20, 24))


# --- Arguments.


@each_subject
def test_the_arguments_have_the_order_and_the_defaults_of_apex(subject: Subject) -> None:
    _, *arguments = inspect.signature(subject.fused).parameters.values()
    by_position = [each for each in arguments if each.kind != each.KEYWORD_ONLY]
    defaults = ", ".join(f"{each.name}={each.default}" for each in by_position)
    assert defaults == subject.signature


@each_subject
def test_a_misspelt_keyword_is_refused(subject: Subject) -> None:
    sentence = f"^{subject.name}: there is no option 'weigth_decay'; .*weight_decay"
    with pytest.raises(TypeError, match=sentence):
        subject.make(make_params(torch.device("cpu")), weigth_decay=0.1)


@each_subject
def test_messages_have_the_published_name_in_a_subclass_too(subject: Subject) -> None:
    params, name = make_params(torch.device("cpu")), rf"^{subject.name}\b"
    optimizer = subject.of_a_user.make(params)
    with pytest.raises(TypeError, match=name + ".*complex"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(3, dtype=torch.complex64))]})
    with pytest.raises(TypeError, match=name + ".load_state_dict: state_dict is a int"):
        optimizer.load_state_dict(3)
    if "unscale_grads" in subject.kept:
        with pytest.raises(TypeError, match=name + ": unscale_grads is 3"):
            subject.of_a_user.make(params, unscale_grads=3)


def test_names_of_apex_are_attributes() -> None:
    params = make_params(torch.device("cpu"))
    assert FusedAdam(params).eps_mode == 1
    assert FusedAdam(params, eps_inside_sqrt=True).eps_mode == 0
    assert FusedSGD(params, 0.1).wd_after_momentum is False


@each_wrong
def test_an_option_out_of_range_is_refused_wherever_it_comes_from(
    subject: Subject, wrong: Wrong, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    mine = subject.of_a_user
    options, refused = wrong.options, {"match": f"^{subject.name}{wrong.sentence}"}
    with pytest.raises(wrong.error, **refused):
        mine.make(params, **options)
    with pytest.raises(wrong.error, **refused):
        mine.make([{"params": params[:1]}, {"params": params[1:], **options}])
    optimizer = mine.in_two_groups(params[:3])
    group = optimizer.param_groups[1]
    words = wrong.sentence if wrong.in_steps is True else wrong.in_steps
    for step in range(2) if words else ():
        train(optimizer, params[:3], range(step))
        good = {name: group[name] for name in options}
        group.update(options)
        give_grads(params, step)
        refused_step = pytest.raises((wrong.error, ValueError), match=f"^{subject.name}{words}")
        with Unchanged(optimizer), refused_step:
            optimizer.step()
        group.update(good)
    with Unchanged(optimizer), pytest.raises(wrong.error, **refused):
        optimizer.add_param_group({"params": params[3:], **options})
    assert len(optimizer.param_groups) == 2
    if wrong.in_files:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][1].update(options)
        with Unchanged(optimizer), pytest.raises(wrong.error, **refused):
            optimizer.load_state_dict(saved)


# --- Copies and checkpoints.

COPIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"max_grad_norm": 0.5},
    "masters": {"master_weights": True},
}


@each_subject
@pytest.mark.parametrize("more", COPIED.values(), ids=COPIED)
@pytest.mark.parametrize("way", ["state_dict", "file", "deepcopy", "pickle"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)
def test_another_optimizer_goes_on_to_the_bit(
    dtype: torch.dtype, way: str, more: Any, subject: Subject, device: torch.device
) -> None:
    if subject.fused is FusedMixedPrecisionLamb and "master_weights" in more:
        more = {}  # `kept` asks for them.
    params = make_params(device, dtype, SMALL)
    optimizer = subject.in_two_groups(params, **(subject.modes[-1] | more | subject.kept))
    train(optimizer, params, range(20), values=BF16, **how)
    if way == "deepcopy":
        others, other = copy.deepcopy((params, optimizer))
    elif way == "pickle":
        others, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        others = copies_of(params)
        other = subject.in_two_groups(others, lr=1.0, **subject.kept)
        saved = optimizer.state_dict()
        other.load_state_dict(through_a_file(saved) if way == "file" else saved)
    assert_same_state(optimizer, other)
    for each in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert {name: getattr(each, name) for name in subject.kept} == subject.kept
    for param, copied in zip(params, others, strict=True):
        for name in subject.tensors if param in optimizer.state else ():
            ours, its = (each[name] for each in (optimizer.state[param], other.state[copied]))
            assert ours.data_ptr() != its.data_ptr()
    go_on((optimizer, params), (other, others))
    assert_same_state(optimizer, other)
    for param, copied in zip(params, others, strict=True):
        assert_same_bits(optimizer.master(param), other.master(copied))


def test_torch_needs_the_steps_that_adagrad_does_not_count() -> None:
    params = make_params(torch.device("cpu"))
    optimizer = FusedAdagrad(params)
    train(optimizer, params, range(1))
    with pytest.raises(KeyError, match="step"):
        torch.optim.Adagrad(copies_of(params)).load_state_dict(optimizer.state_dict())


def test_a_buffer_that_torch_has_not_made_yet_is_none_of_ours(device: torch.device) -> None:
    params = make_params(device, shapes=SMALL)
    saved = torch.optim.SGD(params, 0.5, momentum=0.5, dampening=0.5).state_dict()
    saved["state"] = {0: {"momentum_buffer": None}}
    optimizer = FusedSGD(params, 1.0)
    optimizer.load_state_dict(saved)
    assert not optimizer.state[params[0]]
    train(optimizer, params, [0])
    for param in params:  # The first gradient is not dampened.
        assert torch.equal(optimizer.state[param]["momentum_buffer"], param.grad)


def mixed_params(device: torch.device) -> list[Parameter]:
    """Return parameters of float16 and float32 in turns."""
    shapes = [(5,), (4, 3), (3,), (), (1,), (0, 3)]
    pairs = zip(make_params(device, F16, shapes), make_params(device, F32, shapes), strict=True)
    return [pair[index % 2] for index, pair in enumerate(pairs)]


def in_apex_layout(optimizer: Any, subject: Subject) -> dict[str, Any]:
    """Return a state_dict as apex's optimizer saved it: norms and the step count in the group."""
    saved = copy.deepcopy(optimizer.state_dict())
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for name in {*saved_group} - {*subject.of_apex, "params"}:
            del saved_group[name]
        norms: dict[torch.dtype, list[float]] = {F16: [], F32: []}
        for index, param in zip(saved_group["params"], group["params"], strict=True):
            state = saved["state"].get(index, {})
            if "step" in state:
                saved_group.setdefault("step", int(state["step"]))
            if "exp_avg_sq" in subject.numbers and state:
                norms[param.dtype].append(float(state["exp_avg_sq"]))
                saved_group["exp_avg_sq"] = [torch.tensor(each) for each in norms.values()]
            for name in {*state} & {*subject.numbers}:
                del state[name]
    return saved


@each_subject
def test_a_state_dict_of_apex_goes_on_where_it_was_saved(
    subject: Subject, device: torch.device
) -> None:
    params = mixed_params(device)
    optimizer = subject.in_two_groups(params)
    # apex has norms of the parameters that had a gradient.
    train(optimizer, params, range(3), missing=lambda step, index: index == 2)
    others = copies_of(params)
    other = subject.in_two_groups(others, lr=1.0)
    other.load_state_dict(in_apex_layout(optimizer, subject))
    assert_same_state(optimizer, other)
    go_on((optimizer, params), (other, others))
    assert_same_state(optimizer, other)


# --- Checkpoints that do not fit.


def in_last(name: str, value: Any) -> Any:
    """Return a function that spoils the last parameter's state."""
    return lambda saved: [*saved["state"].values()][-1].update({name: value})


def number_tests(name: str, sentence: str) -> dict[str, Any]:
    where = rf"\.load_state_dict: state\[3\]\['{name}'\] is "
    return {
        f"{name} {value}": (in_last(name, value), where + shown + sentence)
        for value, shown in {
            None: "None",
            "ten": "'ten'",
            torch.ones(2): r"tensor\(\[1., 1.\]\)",
            -1: "-1",
            math.nan: "nan",
        }.items()
    }


def spoilt(subject: Subject) -> dict[str, tuple[Any, str]]:
    """Return functions that spoil a checkpoint of parameters of `SMALL`, and the messages."""
    name = subject.tensors[-1]
    wish = r"; it must be a floating tensor"
    loading = rf"^{subject.name}\.load_state_dict: "
    tensor = rf"{loading}state\[3\]\['{name}'\] "
    found = {
        "another optimizer": (
            lambda saved: saved["state"].update({1: {"other": torch.ones(4, 3)}}),
            rf"{loading}state\[1\] has \[.*'other'\] and lacks .*'{name}'.*; it must be the "
            f"state of {subject.kind} optimizer",
        ),
        "shape": (
            in_last(name, torch.ones(63)),
            tensor + r"has shape \[63\], its parameter \[7, 9\]; they must match",
        ),
        "list": (in_last(name, [1.0] * 63), tensor + "is of type list" + wish),
        "float": (in_last(name, 3.0), tensor + "is of type float" + wish),
        "integers": (
            in_last(name, torch.ones(7, 9, dtype=torch.int64)),
            tensor + r"is of type torch\.int64" + wish,
        ),
        "complex": (
            in_last(name, torch.ones(7, 9, dtype=torch.complex64)),
            tensor + r"is of type torch\.complex64" + wish,
        ),
        "sparse": (in_last(name, torch.ones(7, 9).to_sparse()), tensor + ".*sparse"),
        "fewer parameters": (
            lambda saved: saved["param_groups"][0].update(params=[0]),
            "doesn't match the size of optimizer's group",
        ),
        "more groups": (
            lambda saved: saved["param_groups"].append({"params": []}),
            "different number of parameter groups",
        ),
    }
    if subject.fused is not FusedSGD:  # Then it is as good as none.
        found["None"] = (in_last(name, None), tensor + "is of type NoneType" + wish)
    for option, value in subject.not_of_torch.items():
        found[option] = (
            lambda saved, given={option: value}: saved["param_groups"][1].update(given),
            rf"{loading}param_groups\[1\] has {option}={value}, which {subject.name} does not have",
        )
    if "step" in subject.numbers:
        found |= number_tests("step", "; it must be a number of steps")
    if "exp_avg_sq" in subject.numbers:
        found |= number_tests("exp_avg_sq", "; it must be a finite number, 0 or more")
    return found


@pytest.mark.parametrize(
    ("subject", "spoil", "sentence"),
    [
        pytest.param(subject, *case, id=f"{name}-{what}")
        for name, subject in SUBJECTS.items()
        for what, case in spoilt(subject).items()
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(
    subject: Subject, spoil: Any, sentence: str, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer = subject.of_a_user.in_two_groups(params)
    train(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    with Unchanged(optimizer), pytest.raises((RuntimeError, TypeError, ValueError), match=sentence):
        optimizer.load_state_dict(saved)
    train(optimizer, params, range(3, 4))  # and goes on


@pytest.mark.parametrize("count", [1, 4])
def test_norms_of_apex_that_do_not_fit_are_refused(count: int, device: torch.device) -> None:
    subject, params = SUBJECTS["NovoGrad"], mixed_params(device)
    optimizer = subject.make(params)
    train(optimizer, params, range(1))
    saved = in_apex_layout(optimizer, subject)
    saved["param_groups"][0]["exp_avg_sq"][1] = torch.ones(count)
    sentence = (
        rf"^FusedNovoGrad\.load_state_dict: param_groups\[0\] has {count} norms of parameters of "
        r"torch\.float32, and states of 3; they must match$"
    )
    with Unchanged(optimizer), pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(saved)


@each_subject
def test_entries_that_a_user_wrote_stay_and_plain_numbers_become_tensors(
    subject: Subject, device: torch.device
) -> None:
    params = make_params(device, shapes=SMALL)
    optimizer = subject.make(params)
    train(optimizer, params, range(3))
    others = copies_of(params)
    other = subject.make(others)
    for param, copied in zip(params, others, strict=True):
        state = {name: copy.deepcopy(value) for name, value in optimizer.state[param].items()}
        state |= {name: float(state[name]) for name in subject.numbers}
        other.state[copied] = state | {"mine": "kept"}
    go_on((optimizer, params), (other, others))
    assert {state.pop("mine") for state in other.state.values()} == {"kept"}
    assert_same_state(optimizer, other)

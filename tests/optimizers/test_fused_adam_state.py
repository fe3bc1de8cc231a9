"""FusedAdam's state: what is saved, who can load it, and that training goes on undisturbed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_adam_cases import (
    BF16,
    F16,
    F32,
    F64,
    NAMES,
    MakeOptimizer,
    Optimizer,
    Unchanged,
    assert_same_state,
    assert_same_trajectory,
    copies_of,
    make_params,
    train,
)
from torch.nn import Parameter

from apex_mp.optimizers import FusedAdam

# Unlike every default, so that an option that does not travel shows.
OPTIONS: dict[str, Any] = {
    "lr": 0.02,
    "betas": (0.8, 0.95),
    "eps": 1e-3,
    "weight_decay": 0.2,
    "maximize": True,
}
FIRST, REST = range(20), range(20, 60)
sometimes_missing = {"missing": lambda step, index: (step + index) % 5 == 0}

TORCH_KINDS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "for loop": {"foreach": False},
    "fused": {"fused": True},
}
each_kind = pytest.mark.parametrize("kind", TORCH_KINDS.values(), ids=TORCH_KINDS)
each_torch = pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])


def in_two_groups(make: MakeOptimizer, params: list[Parameter], **options: Any) -> Optimizer:
    """Return an optimizer whose second group has options of its own."""
    own = {"lr": options["lr"] / 2, "weight_decay": 0.0} if options else {}
    return make([{"params": params[:3]}, {"params": params[3:], **own}], **options)


def resumed(make: MakeOptimizer, params: list[Parameter], state: dict[str, Any]) -> Any:
    """Return a new optimizer, with default options, that has loaded the state."""
    optimizer = in_two_groups(make, params)
    optimizer.load_state_dict(state)
    return optimizer


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- Interchange with torch.optim


@each_kind
@each_torch
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_a_torch_run_continues_in_fused_adam(
    dtype: torch.dtype, make: MakeOptimizer, kind: dict[str, Any], device: torch.device
) -> None:
    expected_params = make_params(device, dtype)
    expected = in_two_groups(make, expected_params, **OPTIONS, **kind)
    train(expected, expected_params, FIRST, **sometimes_missing)
    params = copies_of(expected_params)
    optimizer = resumed(FusedAdam, params, expected.state_dict())
    train(expected, expected_params, REST, **sometimes_missing)
    train(optimizer, params, REST, **sometimes_missing)
    assert_same_trajectory(optimizer, params, expected, expected_params)


def test_a_checkpoint_of_apex_with_the_step_count_in_the_group_is_read(
    device: torch.device,
) -> None:
    params = make_params(device)
    optimizer = in_two_groups(FusedAdam, params, **OPTIONS)
    train(optimizer, params, FIRST)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        # The options of apex.optimizers.FusedAdam of 2020.
        kept = ("params", "lr", "bias_correction", "betas", "eps", "weight_decay")
        for key in [key for key in group if key not in kept]:
            del group[key]
        group["step"] = len(FIRST)
    for state in saved["state"].values():
        del state["step"]
    again_params = copies_of(params)
    again = in_two_groups(FusedAdam, again_params, **OPTIONS)
    again.load_state_dict(saved)
    assert all("step" not in group for group in again.param_groups)
    train(optimizer, params, REST)
    train(again, again_params, REST)
    assert_same_state(again, optimizer)


# --- Its own checkpoints


MAKERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"adam_w_mode": False},
    "without bias correction": {"bias_correction": False},
    "eps inside": {"eps_inside_sqrt": True},
    "clipping": {"max_grad_norm": 0.5},
    "masters": {"master_weights": True},
}


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=NAMES.get)
@pytest.mark.parametrize("more", MAKERS.values(), ids=MAKERS)
def test_a_run_continues_to_the_bit_from_its_checkpoint_file(
    more: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    params = make_params(device, dtype)
    optimizer = in_two_groups(FusedAdam, params, **OPTIONS, **more)
    train(optimizer, params, FIRST, values=BF16, **sometimes_missing)
    again_params = copies_of(params)
    again = resumed(FusedAdam, again_params, through_a_file(optimizer.state_dict()))
    assert_same_state(again, optimizer)
    train(optimizer, params, REST, values=BF16, **sometimes_missing)
    train(again, again_params, REST, values=BF16, **sometimes_missing)
    assert_same_state(again, optimizer)


# --- What is refused


def amsgrad_state(params: list[Parameter]) -> dict[str, Any]:
    source = torch.optim.Adam(copies_of(params), amsgrad=True)
    train(source, source.param_groups[0]["params"], range(2))
    return source.state_dict()


def second_group_amsgrad(params: list[Parameter]) -> dict[str, Any]:
    saved = FusedAdam(copies_of(params)).state_dict()
    saved["param_groups"].append({**saved["param_groups"][0], "params": [], "amsgrad": True})
    return saved


def sgd_state(params: list[Parameter]) -> dict[str, Any]:
    source = torch.optim.SGD(copies_of(params), lr=0.1, momentum=0.9)
    train(source, source.param_groups[0]["params"], range(2))
    return source.state_dict()


def other_shape_state(params: list[Parameter]) -> dict[str, Any]:
    others = [Parameter(p.detach().reshape(-1)) for p in params]
    source = FusedAdam(others)
    train(source, others, range(2))
    return source.state_dict()


def other_size_state(params: list[Parameter]) -> dict[str, Any]:
    return FusedAdam(copies_of(params[1:])).state_dict()


def other_groups_state(params: list[Parameter]) -> dict[str, Any]:
    return in_two_groups(FusedAdam, copies_of(params)).state_dict()


def damaged(**last: Any) -> Callable[[list[Parameter]], dict[str, Any]]:
    """A state whose last parameter has something else in place of what it should have."""

    def make_state(params: list[Parameter]) -> dict[str, Any]:
        others = copies_of(params)
        source = FusedAdam(others, lr=0.1)
        train(source, others, range(2))
        saved = source.state_dict()
        saved["state"][len(params) - 1].update(last)
        return saved

    return make_state


def with_options(**options: Any) -> Callable[[list[Parameter]], dict[str, Any]]:
    def make_state(params: list[Parameter]) -> dict[str, Any]:
        saved = damaged()(params)
        saved["param_groups"][-1].update(options)
        return saved

    return make_state


REFUSED: dict[str, tuple[Callable[[list[Parameter]], dict[str, Any]], str]] = {
    "amsgrad": (amsgrad_state, "FusedAdam does not support the AMSGrad variant."),
    "amsgrad in the second group": (second_group_amsgrad, "does not support the AMSGrad variant"),
    "SGD": (
        sgd_state,
        r"state\[0\] has \['momentum_buffer'\] and lacks \['step', 'exp_avg', 'exp_avg_sq'\]; "
        "it must be the state of an Adam optimizer",
    ),
    "other shapes": (
        other_shape_state,
        r"state\[1\]\['exp_avg'\] has shape \[12\], its parameter \[4, 3\]; they must match",
    ),
    "a moment that is None": (damaged(exp_avg_sq=None), r"\['exp_avg_sq'\] is of type NoneType"),
    "a moment that is a list": (
        damaged(exp_avg=[1.0] * 667),
        r"state\[5\]\['exp_avg'\] is of type",
    ),
    "a moment of integers": (
        damaged(exp_avg=torch.ones(23, 29, dtype=torch.int64)),
        r"is of type torch.int64; it must be a floating tensor",
    ),
    "a complex moment": (
        damaged(exp_avg_sq=torch.ones(23, 29, dtype=torch.complex64)),
        "is of type torch.complex64",
    ),
    "a sparse moment": (damaged(exp_avg_sq=torch.ones(23, 29).to_sparse()), "sparse"),
    "a step that is None": (
        damaged(step=None),
        r"state\[5\]\['step'\] is None; it must be a number",
    ),
    "a step that is a word": (damaged(step="ten"), r"state\[5\]\['step'\] is 'ten'"),
    "two steps": (damaged(step=torch.ones(2)), r"\['step'\] is tensor\(\[1., 1.\]\)"),
    "a step below 0": (damaged(step=-1), r"\['step'\] is -1; it must be a number of steps"),
    "a step that is NaN": (damaged(step=float("nan")), r"\['step'\] is nan"),
    "lr below 0": (with_options(lr=-0.1), "lr is -0.1; it must be 0 or more"),
    "lr that is a word": (with_options(lr="low"), "lr is 'low'; it must be a number$"),
    "one beta": (with_options(betas=(0.9,)), r"betas is \(0.9,\); it must be two numbers"),
    "eps NaN": (with_options(eps=float("nan")), "eps is nan; it must be 0 or more"),
    "fewer parameters": (other_size_state, "doesn't match the size of optimizer's group"),
    "more groups": (other_groups_state, "different number of parameter groups"),
}


@pytest.mark.parametrize(("make_state", "message"), REFUSED.values(), ids=REFUSED)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(
    make_state: Callable[[list[Parameter]], dict[str, Any]], message: str, device: torch.device
) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params, lr=0.3)
    train(optimizer, params, range(3))
    saved = make_state(params)
    with Unchanged(optimizer), pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        optimizer.load_state_dict(saved)
    train(optimizer, params, range(3, 4))  # and goes on

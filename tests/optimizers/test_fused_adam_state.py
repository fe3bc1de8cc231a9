"""FusedAdam's state: what is saved, who can load it, and that training goes on undisturbed."""

from __future__ import annotations

import copy
import io
import pickle
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
    give_grads,
    make_params,
    options_of,
    train,
)
from tolerances import TRAJECTORY_TOLERANCES, assert_same_bits
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
each_narrow = pytest.mark.parametrize("dtype", [F16, BF16], ids=NAMES.get)


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


@each_kind
@each_torch
@pytest.mark.parametrize("dtype", [F32, F64], ids=NAMES.get)
def test_a_run_of_fused_adam_continues_in_torch(
    dtype: torch.dtype, make: MakeOptimizer, kind: dict[str, Any], device: torch.device
) -> None:
    adam_w_mode = make is torch.optim.AdamW
    params = make_params(device, dtype)
    optimizer = in_two_groups(FusedAdam, params, **OPTIONS, adam_w_mode=adam_w_mode)
    train(optimizer, params, FIRST, **sometimes_missing)
    expected_params = copies_of(params)
    # A copy, because torch's optimizers share the tensors of what they load.
    saved = copy.deepcopy(optimizer.state_dict())
    expected = in_two_groups(make, expected_params, **OPTIONS, **kind)
    expected.load_state_dict(saved)
    train(expected, expected_params, REST, **sometimes_missing)
    train(optimizer, params, REST, **sometimes_missing)
    assert_same_trajectory(optimizer, params, expected, expected_params)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_the_way_of_decay_travels_to_torch_and_back(
    adam_w_mode: bool, device: torch.device
) -> None:
    # torch.optim.Adam does both, and says so in the group.
    params = make_params(device)
    optimizer = in_two_groups(FusedAdam, params, **OPTIONS, adam_w_mode=adam_w_mode)
    train(optimizer, params, FIRST)
    expected_params, back_params = copies_of(params), copies_of(params)
    expected = resumed(torch.optim.Adam, expected_params, copy.deepcopy(optimizer.state_dict()))
    back = resumed(FusedAdam, back_params, expected.state_dict())
    assert [group["adam_w_mode"] for group in back.param_groups] == [adam_w_mode] * 2
    for one, ones in ((optimizer, params), (expected, expected_params), (back, back_params)):
        train(one, ones, REST)
    assert_same_trajectory(optimizer, params, expected, expected_params)
    assert_same_trajectory(back, back_params, expected, expected_params)


def test_options_that_torch_lacks_stay_as_each_group_has_them(device: torch.device) -> None:
    own = [{"adam_w_mode": False, "eps_inside_sqrt": True}, {"max_grad_norm": 0.5}]
    sources, params = make_params(device, F32, [(3,), (3,)]), make_params(device, F32, [(3,), (3,)])
    source = torch.optim.Adam([{"params": [p]} for p in sources], lr=0.5)
    train(source, sources, range(2))
    saved = source.state_dict()
    for group in saved["param_groups"]:
        del group["decoupled_weight_decay"]  # as in checkpoints of older versions of torch
    optimizer = FusedAdam(
        [{"params": [p], **o} for p, o in zip(params, own, strict=True)], bias_correction=False
    )
    optimizer.load_state_dict(saved)
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"]) == (0.5, 0.5)
    assert (first["adam_w_mode"], second["adam_w_mode"]) == (False, True)
    assert (first["eps_inside_sqrt"], second["eps_inside_sqrt"]) == (True, False)
    assert (first["max_grad_norm"], second["max_grad_norm"]) == (0.0, 0.5)
    assert (first["bias_correction"], second["bias_correction"]) == (False, False)


OTHER_STEPS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "float64": lambda step: step.double(),
    "int64": lambda step: step.long(),
    "one element": lambda step: step.reshape(1),
    "on the CPU": lambda step: step.cpu(),
}


@pytest.mark.parametrize("kind", [tuple, list])
def test_betas_that_are_tensors_are_saved_and_loaded(kind: Any, device: torch.device) -> None:
    params = make_params(device)
    expected_params = copies_of(params)
    optimizer = FusedAdam(params, betas=kind(map(torch.tensor, (0.5, 0.75))))
    expected = FusedAdam(expected_params, betas=(0.5, 0.75))
    for each, theirs in ((optimizer, params), (expected, expected_params)):
        train(each, theirs, FIRST)
        each.load_state_dict(each.state_dict())
        train(each, theirs, REST)
    for param, wanted in zip(params, expected_params, strict=True):
        assert_same_bits(param.detach(), wanted.detach())


@pytest.mark.parametrize("change", OTHER_STEPS.values(), ids=OTHER_STEPS)
def test_step_counts_of_other_kinds_are_read(
    change: Callable[[Any], Any], device: torch.device
) -> None:
    params = make_params(device)
    optimizer = in_two_groups(FusedAdam, params, **OPTIONS)
    train(optimizer, params, FIRST)
    saved = optimizer.state_dict()
    for index, state in saved["state"].items():
        saved["state"][index] = {**state, "step": change(state["step"])}
    again_params = copies_of(params)
    again = resumed(FusedAdam, again_params, saved)
    train(optimizer, params, REST)
    train(again, again_params, REST)
    assert_same_state(again, optimizer)


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


@each_narrow
def test_moments_of_low_precision_torch_runs_become_float32(
    dtype: torch.dtype, device: torch.device
) -> None:
    expected_params = make_params(device, dtype, [(6,), (2, 2)])
    expected = torch.optim.AdamW(expected_params)
    train(expected, expected_params, FIRST)
    params = copies_of(expected_params)
    optimizer = FusedAdam(params)
    optimizer.load_state_dict(expected.state_dict())
    for param, source in zip(params, expected_params, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert expected.state[source][key].dtype == dtype
            assert_same_bits(optimizer.state[param][key], expected.state[source][key].float())
    train(optimizer, params, REST)


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


def test_a_checkpoint_made_before_the_first_step_can_be_loaded(device: torch.device) -> None:
    params, again_params = make_params(device), make_params(device)
    optimizer = in_two_groups(FusedAdam, params, **OPTIONS)
    again = resumed(FusedAdam, again_params, through_a_file(optimizer.state_dict()))
    assert not again.state
    train(optimizer, params, FIRST)
    train(again, again_params, FIRST)
    assert_same_state(again, optimizer)


def test_the_loaded_state_lies_as_the_parameters_do(device: torch.device) -> None:
    params = make_params(device, F16, [(2, 3, 4, 5)])
    optimizer = FusedAdam(params, master_weights=True)
    train(optimizer, params, FIRST)
    laid = [Parameter(params[0].detach().contiguous(memory_format=torch.channels_last))]
    again = FusedAdam(laid)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[laid[0]]["exp_avg"].stride() == laid[0].stride()
    train(optimizer, params, REST)
    train(again, laid, REST)
    assert_same_bits(laid[0].detach(), params[0].detach())


def test_loading_shares_no_tensor_with_what_was_loaded(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params, lr=torch.tensor(0.1))
    train(optimizer, params, FIRST)
    other_params = copies_of(params)
    other = FusedAdam(other_params)
    other.load_state_dict(optimizer.state_dict())
    with Unchanged(optimizer):
        train(other, other_params, REST)
        other.param_groups[0]["lr"].fill_(7.0)


def test_loading_does_not_change_the_given_dictionary(device: torch.device) -> None:
    params = make_params(device)
    source = torch.optim.Adam(params)
    train(source, params, range(1))
    saved = source.state_dict()
    before = copy.deepcopy(saved)
    FusedAdam(copies_of(params)).load_state_dict(saved)
    assert saved["param_groups"] == before["param_groups"]
    assert saved["state"].keys() == before["state"].keys()
    for index, state in saved["state"].items():
        assert state.keys() == before["state"][index].keys()
        assert state["exp_avg"].dtype == F32


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


# --- Hooks around saving and loading


def test_load_hooks_see_plain_tensors_and_may_change_the_state(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedAdam(params)
    train(optimizer, params, range(3))
    again = FusedAdam(copies_of(params))
    seen = []

    def halve(one: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append(type(saved["state"][0]["exp_avg"]))
        state = {
            index: {**state, "exp_avg": state["exp_avg"] / 2}
            for index, state in saved["state"].items()
        }
        return {**saved, "state": state}

    def look(one: Optimizer) -> None:
        seen.append(type(one.state[one.param_groups[0]["params"][0]]["exp_avg"]))

    again.register_load_state_dict_pre_hook(halve)
    again.register_load_state_dict_post_hook(look)
    again.load_state_dict(optimizer.state_dict())
    assert seen == [torch.Tensor, torch.Tensor]
    first = again.param_groups[0]["params"][0]
    assert_same_bits(again.state[first]["exp_avg"], optimizer.state[params[0]]["exp_avg"] / 2)
    again.load_state_dict(optimizer.state_dict())
    assert len(seen) == 4  # our own hook has not multiplied


def test_state_dict_hooks_fire_once(device: torch.device) -> None:
    optimizer = FusedAdam(make_params(device))
    calls = []
    optimizer.register_state_dict_pre_hook(lambda one: calls.append("before"))
    optimizer.register_state_dict_post_hook(lambda one, saved: calls.append("after"))
    optimizer.state_dict()
    assert calls == ["before", "after"]


# --- Names, copies, pickles


def test_names_of_parameters_are_saved_and_loaded(device: torch.device) -> None:
    model = torch.nn.Linear(2, 2).to(device)
    optimizer = FusedAdam(model.named_parameters())
    train(optimizer, list(model.parameters()), range(1))
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    saved = through_a_file(optimizer.state_dict())
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    other = FusedAdam([("a", Parameter(torch.ones(2, 2))), ("b", Parameter(torch.ones(2)))])
    other.load_state_dict(saved)
    assert other.param_groups[0]["param_names"] == ["weight", "bias"]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=NAMES.get)
def test_a_copy_trains_on_alone_and_to_the_bit(
    dtype: torch.dtype, make_copy: Callable[[Any], Any], device: torch.device
) -> None:
    params = make_params(device, dtype)
    optimizer = in_two_groups(FusedAdam, params, **OPTIONS, master_weights=True)
    train(optimizer, params, FIRST)
    again_params, again = make_copy((params, optimizer))
    assert_same_state(again, optimizer)
    with Unchanged(optimizer):
        train(again, again_params, REST)
    train(optimizer, params, REST)
    assert_same_state(again, optimizer)
    assert again.defaults.items() >= optimizer.defaults.items()


def test_a_pickled_optimizer_still_serves_grad_scaler_and_loads_checkpoints(
    device: torch.device,
) -> None:
    params = make_params(device)
    optimizer = pickle.loads(pickle.dumps(FusedAdam(params)))
    copied = optimizer.param_groups[0]["params"]
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    give_grads(copied, 0, factor=4.0)
    scaler.step(optimizer)
    expected = FusedAdam(params)
    train(expected, params, range(1))
    assert_same_state(optimizer, expected)
    optimizer.load_state_dict(expected.state_dict())
    assert_same_state(optimizer, expected)


def test_saved_groups_hold_plain_values_only(device: torch.device) -> None:
    group = FusedAdam(make_params(device)).state_dict()["param_groups"][0]
    kinds = {type(value) for value in options_of(group).values()}
    assert kinds <= {float, int, bool, tuple}
    assert group["decoupled_weight_decay"] is group["adam_w_mode"] is True


def test_float64_is_the_default_dtype_of_somebody(device: torch.device) -> None:
    # torch.optim then counts steps in float64.
    params = make_params(device)
    source = torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)
    optimizer = FusedAdam(again_params := copies_of(params))
    torch.set_default_dtype(F64)
    try:
        train(source, params, FIRST)
        assert source.state[params[0]]["step"].dtype == F64
        optimizer.load_state_dict(source.state_dict())
        for param, source_param in zip(again_params, params, strict=True):
            param.data.copy_(source_param.detach())
        train(source, params, REST)
        train(optimizer, again_params, REST)
    finally:
        torch.set_default_dtype(F32)
    bounds = TRAJECTORY_TOLERANCES[F32]
    assert_same_trajectory(optimizer, again_params, source, params, bounds)


def test_a_step_count_that_is_a_number_goes_on(device: torch.device) -> None:
    """As apex had it in a parameter's state, which a script may have filled by itself."""
    results = []
    for as_number in (False, True):
        params = make_params(device)
        optimizer = FusedAdam(params)
        train(optimizer, params, FIRST)
        if as_number:
            for state in optimizer.state.values():
                state["step"] = int(state["step"])
        train(optimizer, params, REST)
        results.append(params)
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)

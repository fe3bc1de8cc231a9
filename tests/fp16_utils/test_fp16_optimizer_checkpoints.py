"""Checkpoints: a resumed run goes on bit for bit, old layouts load, what cannot fit does not."""

import copy
import io
from typing import Any

import pytest
import torch
from fp16_cases import (
    BF16,
    F16,
    F32,
    FACES,
    INF,
    assert_same,
    everything,
    faces,
    ones,
    parameter,
    pull,
)
from torch.utils._pytree import tree_leaves

from apex_mp import fp16_utils, optimizers
from apex_mp.fp16_utils import DynamicLossScaler, LossScaler
from apex_mp.optimizers import FusedAdam

UTILS, FUSED = fp16_utils.FP16_Optimizer, optimizers.FP16_Optimizer

INNERS: dict[str, Any] = {
    "fused": lambda groups: FusedAdam(groups, lr=0.02, weight_decay=0.1, max_grad_norm=1.0),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
}
SCALINGS: dict[str, dict[str, Any]] = {
    "static": {"static_loss_scale": 128.0},
    "dynamic": {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 256.0, "scale_window": 3},
    },
    "hysteresis": {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 256.0, "scale_window": 3, "hysteresis": 2},
    },
}
inners = pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS.keys())
savers = pytest.mark.parametrize("saver", FACES.values(), ids=FACES.keys())
loaders = pytest.mark.parametrize("loader", FACES.values(), ids=FACES.keys())


class Model(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape, dtype in (
            ("weight", (3, 2), F16),
            ("bias", (3,), F32),
            ("other", (2, 2), BF16),
            ("last", (5,), F16),
        ):
            values = torch.randn(shape, generator=generator)
            setattr(self, name, parameter(values, dtype, device))

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": [self.weight, self.bias]},
            {"params": [self.other, self.last], "weight_decay": 0.0},
        ]


def build(device: torch.device, inner: Any, face: Any, **scaling: Any) -> tuple[Model, Any]:
    model = Model(device)
    return model, face(inner(model.groups()), verbose=False, **scaling)


# The first part ends with the counts of the scale in mid-way: one overflow, one good step.
FIRST = [1.0, 2.0, 3.0, INF, INF, 1.0, INF, 2.0]
SECOND = [2.0, INF, 1.0, 1.0, 3.0, 2.0, INF, INF, 1.0, 1.0]


def train(model: Model, optimizer: Any, values: list[float]) -> list[float]:
    scales = []
    for index, value in enumerate(values):
        optimizer.zero_grad(set_to_none=True)  # The faces have different defaults.
        generator = torch.Generator().manual_seed(index)
        pairs = [
            (param, value * torch.randn(param.shape, generator=generator))
            for param in model.parameters()
        ]
        optimizer.backward(pull(*pairs[1:] if index == 4 else pairs))
        optimizer.step()
        scales.append(optimizer.loss_scale)
    return scales


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@faces
@inners
def test_the_old_keys_are_there(inner: Any, face: Any, device: torch.device) -> None:
    for scaling in SCALINGS.values():
        optimizer = build(device, inner, face, **scaling)[1]
        keys = set(optimizer.state_dict())
        if face is UTILS:
            assert keys >= {
                "loss_scaler",
                "dynamic_loss_scale",
                "overflow",
                "first_closure_call_this_step",
                "optimizer_state_dict",
                "fp32_from_fp16",
            }
        else:
            dynamic = {"last_overflow_iter", "scale_factor", "scale_window"}
            assert keys >= {
                "dynamic_loss_scale",
                "cur_scale",
                "cur_iter",
                "optimizer_state_dict",
                "fp32_groups_flat",
                *(dynamic if optimizer.dynamic_loss_scale else ()),
            }


@faces
@inners
def test_saved_masters_are_copies(inner: Any, face: Any, device: torch.device) -> None:
    model, optimizer = build(device, inner, face, static_loss_scale=128.0)
    state = optimizer.state_dict()
    key = "fp32_from_fp16" if face is UTILS else "fp32_groups_flat"
    saved = copy.deepcopy(state[key])
    train(model, optimizer, [1.0, 2.0])
    assert_same(tree_leaves(state[key]), tree_leaves(saved))


@faces
@inners
def test_the_model_equals_the_rounded_masters_after_loading(
    inner: Any, face: Any, device: torch.device
) -> None:
    model, optimizer = build(device, inner, face, static_loss_scale=128.0)
    train(model, optimizer, FIRST)
    resumed_model, resumed = build(device, inner, face, static_loss_scale=128.0)
    resumed.load_state_dict(optimizer.state_dict())
    for ours, theirs in zip(resumed.all_fp16_params, optimizer.all_fp16_params, strict=True):
        assert torch.equal(ours, theirs)
    for param, master in zip(
        resumed.all_fp16_params, resumed.all_fp32_from_fp16_params, strict=True
    ):
        assert torch.equal(param, master.to(param.dtype))
    assert torch.equal(resumed_model.weight, model.weight)


# What does not fit.


def drop(key: str) -> Any:
    return lambda state: state.pop(key)


def change(key: str, edit: Any) -> Any:
    def damage(state: Any) -> None:
        state[key] = edit(state[key])

    return damage


def last_master(edit: Any) -> Any:
    """Faults are in the last of all tensors, so that half a load would show."""
    return change("fp32_from_fp16", lambda x: [*x[:-1], [*x[-1][:-1], edit(x[-1][-1])]])


def last_vector(edit: Any) -> Any:
    return change("fp32_groups_flat", lambda x: [*x[:-1], edit(x[-1])])


DAMAGES: dict[str, tuple[Any, Any, str]] = {
    "no dynamic_loss_scale": (UTILS, drop("dynamic_loss_scale"), "'dynamic_loss_scale' is missing"),
    "no inner state": (UTILS, drop("optimizer_state_dict"), "'optimizer_state_dict' is missing"),
    "no masters": (UTILS, drop("fp32_from_fp16"), "'fp32_groups_flat' is missing"),
    "no scale": (FUSED, drop("cur_scale"), "'cur_scale' is missing"),
    "no iteration": (FUSED, drop("cur_iter"), "'cur_iter' is missing"),
    "no window": (FUSED, drop("scale_window"), "'scale_window' is missing"),
    "no vectors": (FUSED, drop("fp32_groups_flat"), "'fp32_groups_flat' is missing"),
    "a group too few": (
        UTILS,
        change("fp32_from_fp16", lambda x: x[:1]),
        "fp32_from_fp16 has 1 groups, this optimizer has 2; they must match",
    ),
    "a group too many": (
        UTILS,
        change("fp32_from_fp16", lambda x: [*x, []]),
        "fp32_from_fp16 has 3 groups, this optimizer has 2; they must match",
    ),
    "a master too few": (
        UTILS,
        change("fp32_from_fp16", lambda x: [x[0], x[1][:1]]),
        "fp32_from_fp16[1] has 1 masters, group 1 of this optimizer has 2; they must match",
    ),
    "another shape": (
        UTILS,
        last_master(lambda x: x[None]),
        "fp32_from_fp16[1][1] has shape [1, 5], this optimizer's has [5]; they must match",
    ),
    "a vector too few": (
        FUSED,
        change("fp32_groups_flat", lambda x: x[:1]),
        "fp32_groups_flat has 1 groups, this optimizer has 2; they must match",
    ),
    "a vector too short": (
        FUSED,
        last_vector(lambda x: x[1:]),
        "fp32_groups_flat[1] has shape [8], this optimizer's has [9]; they must match",
    ),
    "a scale of 0": (FUSED, change("cur_scale", lambda _: 0.0), "scale is 0"),
    "a negative window": (FUSED, change("scale_window", lambda _: -3), "scale_window is -3"),
    "an iteration that is a word": (UTILS, change("cur_iter", lambda _: "7"), "cur_iter is '7'"),
    "half an iteration": (UTILS, change("cur_iter", lambda _: 1.5), "cur_iter is 1.5; it must be"),
    "no number of iterations": (FUSED, change("cur_iter", lambda _: None), "NoneType"),
    "no scaler": (UTILS, change("loss_scaler", lambda _: None), "NoneType"),
    "a scaler of the other kind": (UTILS, change("dynamic_loss_scale", lambda _: False), "unknown"),
    "a scale that is a word": (FUSED, change("cur_scale", lambda _: "big"), "scale is 'big'"),
    "no lists of masters": (UTILS, change("fp32_from_fp16", lambda _: None), "NoneType"),
    "a master that is None": (UTILS, last_master(lambda _: None), "fp32_from_fp16[1][1] is a None"),
    "a master that is a list": (UTILS, last_master(lambda x: x.tolist()), "[1][1] is a list"),
    "a master of integers": (UTILS, last_master(lambda x: x.long()), "tensor of torch.int64"),
    "a complex master": (UTILS, last_master(lambda x: x.cfloat()), "tensor of torch.complex64"),
    "a sparse master": (UTILS, last_master(lambda x: x.to_sparse()), "torch.sparse_coo"),
    "a master without data": (UTILS, last_master(lambda x: x.to("meta")), "on meta"),
    "a sparse vector": (FUSED, last_vector(lambda x: x.to_sparse()), "fp32_groups_flat[1] is a"),
    "a vector of integers": (FUSED, last_vector(lambda x: x.long()), "tensor of torch.int64"),
    "an inner state that is None": (UTILS, change("optimizer_state_dict", lambda _: None), "None"),
    "an inner group too few": (
        UTILS,
        change("optimizer_state_dict", lambda x: {**x, "param_groups": x["param_groups"][:1]}),
        "parameter groups",
    ),
}


def numbers_of(optimizer: Any) -> Any:
    """Return copies of all that is no tensor: options, loss scale, counts."""
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    counts = (optimizer.cur_iter, optimizer.overflow, optimizer.first_closure_call_this_step)
    return copy.deepcopy(
        (options, type(optimizer.loss_scaler), vars(optimizer.loss_scaler), counts)
    )


@pytest.mark.parametrize("case", DAMAGES)
@pytest.mark.parametrize("inner", [INNERS["fused"], INNERS["AdamW"]], ids=["fused", "AdamW"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(
    inner: Any, case: str, device: torch.device
) -> None:
    face, damage, words = DAMAGES[case]
    model, optimizer = build(device, inner, face, **SCALINGS["dynamic"])
    train(model, optimizer, FIRST)
    state = copy.deepcopy(optimizer.state_dict())
    damage(state)
    for scaling in ("static", "dynamic"):
        model, optimizer = build(device, inner, face, **SCALINGS[scaling])
        train(model, optimizer, SECOND)
        before = everything(optimizer, *model.parameters())
        numbers = numbers_of(optimizer)
        with pytest.raises((TypeError, ValueError)) as raised:
            optimizer.load_state_dict(state)
        assert words in str(raised.value)
        assert_same(everything(optimizer, *model.parameters()), before)
        assert numbers_of(optimizer) == numbers
        assert optimizer.cur_iter == len(SECOND)


# Parameters that were unfrozen while the checkpointed run trained.


@savers
@loaders
@pytest.mark.parametrize("shapes", [((4,), (4,)), ((2,), (6,))], ids=["equal", "unequal"])
@pytest.mark.parametrize("inner", [INNERS["fused"], INNERS["AdamW"]], ids=["fused", "AdamW"])
def test_masters_find_their_parameters_after_unfreezing(
    inner: Any, shapes: Any, saver: Any, loader: Any, device: torch.device
) -> None:
    def params() -> list[Any]:
        return [parameter(torch.full(shapes[i], 1.0 + i), F16, device) for i in range(2)]

    frozen, trained = params()
    frozen.requires_grad_(False)
    optimizer = saver(inner([frozen, trained]), 128.0, verbose=False)
    optimizer.backward(pull((trained, 1.0)))
    optimizer.step()
    frozen.requires_grad_(True)
    optimizer.backward(pull((frozen, 1.0), (trained, 1.0)))
    optimizer.step()
    resumed_params = params()  # All of them require grad from the start.
    resumed = loader(inner(resumed_params), 128.0, verbose=False)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for ours, theirs in zip(resumed_params, [frozen, trained], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dynamic", [True, False])
@loaders
def test_a_checkpoint_that_holds_the_scaler_itself_is_loaded(
    loader: Any, dynamic: bool, device: torch.device
) -> None:
    model, optimizer = build(device, INNERS["AdamW"], UTILS, **SCALINGS["dynamic"])
    train(model, optimizer, FIRST)
    state = copy.deepcopy(optimizer.state_dict())
    scaler: Any = DynamicLossScaler(512.0, 4.0, 50) if dynamic else LossScaler(64.0)
    if dynamic:
        scaler.cur_iter, scaler.last_overflow_iter = 70, 60
    state["loss_scaler"], state["dynamic_loss_scale"] = scaler, dynamic
    resumed = build(device, INNERS["AdamW"], loader, static_loss_scale=2.0)[1]
    resumed.load_state_dict(state)
    assert resumed.dynamic_loss_scale is dynamic
    assert resumed.loss_scale == scaler.cur_scale
    if dynamic:
        assert (resumed.cur_iter, resumed.last_overflow_iter) == (70, 60)
        assert (resumed.scale_factor, resumed.scale_window) == (4.0, 50)
    assert resumed.loss_scaler is not scaler


@loaders
def test_a_checkpoint_of_the_old_fused_optimizer_is_loaded(
    loader: Any, device: torch.device
) -> None:
    # It had one flat master a group, which was the inner optimizer's only parameter.
    a, b = ones(2, 2, device=device), ones(3, device=device)
    options = {"lr": 0.5, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
    group = {**options, "weight_decay": 0.0, "max_grad_norm": 0.0, "params": [140204]}
    flat = torch.arange(1.0, 8.0) + 2.0**-13
    state = {
        "dynamic_loss_scale": True,
        "cur_scale": 2.0**15,
        "cur_iter": 12,
        "last_overflow_iter": 9,
        "scale_factor": 2,
        "scale_window": 1000,
        "optimizer_state_dict": {
            "state": {140204: {"step": 11, "exp_avg": flat * 2, "exp_avg_sq": flat * 3}},
            "param_groups": [group],
        },
        "fp32_groups_flat": [flat],
    }
    optimizer = loader(FusedAdam([a, b]), verbose=False)
    optimizer.load_state_dict(state)
    assert (optimizer.loss_scale, optimizer.cur_iter) == (2.0**15, 12)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert a.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    for master, part in zip(optimizer.param_groups[0]["params"], flat.split([4, 3]), strict=True):
        saved = optimizer.state[master]
        assert master.flatten().tolist() == part.tolist()
        assert saved["exp_avg"].flatten().tolist() == (part * 2).tolist()
        assert saved["exp_avg_sq"].flatten().tolist() == (part * 3).tolist()
        assert float(saved["step"]) == 11.0


@faces
def test_state_of_equal_shapes_stays_with_its_parameter(face: Any, device: torch.device) -> None:
    """Groups in the order of early 2018, with masters first, would fit as well."""

    def new() -> tuple[list[Any], Any]:
        params = [
            torch.nn.Parameter(torch.ones(3, device=device, dtype=dtype))
            for dtype in (torch.float32, torch.float16)
        ]
        return params, face(torch.optim.AdamW(params), verbose=False)

    params, optimizer = new()
    optimizer.backward(pull(*zip(params, (1.0, 2.0), strict=True)))
    optimizer.step()
    resumed = new()[1]
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pairs = zip(resumed.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True)
    for one, other in pairs:
        assert_same(tree_leaves(resumed.state[one]), tree_leaves(optimizer.state[other]))


@faces
@inners
def test_the_number_of_steps_comes_back_with_a_static_scale(
    inner: Any, face: Any, device: torch.device
) -> None:
    model, optimizer = build(device, inner, face, static_loss_scale=128.0)
    train(model, optimizer, FIRST)
    resumed = build(device, inner, face, static_loss_scale=128.0)[1]
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed._iteration == len(FIRST)

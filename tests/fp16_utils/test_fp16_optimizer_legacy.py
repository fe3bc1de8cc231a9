"""The surface that code of 2019 uses: subclasses, foreign optimizers, old attributes, errors."""

import copy
import inspect
from typing import Any

import pytest
import torch
from fp16_cases import (
    F16,
    F32,
    INF,
    assert_grads,
    assert_same,
    everything,
    faces,
    grads_used,
    ones,
    parameter,
    probes,
    pull,
)

from apex_mp import fp16_utils, optimizers


def sgd(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **{"lr": 0.25, **more})


@faces
def test_the_signatures_are_those_of_2019(face: Any) -> None:
    def positional(function: Any) -> dict[str, Any]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind in kinds and p.name != "self"}

    assert positional(face) == {
        "init_optimizer": None,  # Needed, but `optimizer=` will do.
        "static_loss_scale": 1.0,
        "dynamic_loss_scale": False,
        "dynamic_loss_args": None,
        "verbose": True,
    }
    empty = inspect.Parameter.empty
    assert positional(face.backward) == {
        "loss": empty,
        "update_master_grads": True,
        "retain_graph": False,
    }
    assert positional(face.step) == {"closure": None}
    assert positional(face.clip_master_grads) == {"max_norm": empty, "norm_type": 2}
    assert [*positional(face.zero_grad)] == ["set_grads_to_None"]
    assert face.__name__ == "FP16_Optimizer"  # Which toolkits look at.


@faces
def test_the_old_attributes_are_there(face: Any, device: torch.device) -> None:
    optimizer = face(sgd([ones(1, device=device)]), 8.0, verbose=False)
    assert optimizer.verbose is False
    assert optimizer.first_closure_call_this_step is True
    assert optimizer.clip_grad_norm is torch.nn.utils.clip_grad_norm_
    assert optimizer.loss_scaler.loss_scale == 8.0
    assert optimizer.overflow is False
    assert optimizer.cur_iter == 0
    assert optimizer.dynamic_loss_scale is False
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.param_groups is optimizer.optimizer.param_groups


@faces
@probes
def test_the_loss_scale_may_be_written(probe: Any, face: Any, device: torch.device) -> None:
    for name in ("loss_scale", "cur_scale"):
        weight = ones(2, device=device)
        optimizer = face(probe([weight]), 8.0, verbose=False)
        setattr(optimizer, name, 32)
        assert optimizer.loss_scale == optimizer.cur_scale == 32.0
        assert optimizer.loss_scaler.loss_scale == 32.0
        optimizer.backward(pull((weight, 3.0)))
        assert_grads([weight.grad], 96.0)
        optimizer.step()
        assert_grads(grads_used(optimizer), 3.0)


@faces
def test_the_dynamic_state_may_be_read_and_written(face: Any, device: torch.device) -> None:
    weight = ones(2, device=device)
    args = {"init_scale": 64.0, "scale_window": 4}
    optimizer = face(sgd([weight]), dynamic_loss_scale=True, dynamic_loss_args=args, verbose=False)

    def step(value: float) -> tuple[float, int, int]:
        optimizer.zero_grad()
        optimizer.backward(pull((weight, value)))
        optimizer.step()
        return optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter

    assert step(2.0**-9) == (64.0, 1, -1)
    assert step(INF) == (32.0, 2, 1)
    optimizer.scale_factor = 8.0
    optimizer.scale_window = 2
    assert step(2.0**-9) == (32.0, 3, 1)
    assert step(2.0**-9) == (256.0, 4, 1)
    optimizer.cur_iter = 10
    optimizer.last_overflow_iter = 8
    assert step(2.0**-9) == (2048.0, 11, 8)
    assert step(INF) == (256.0, 12, 11)


@faces
def test_a_static_scale_counts_steps_and_has_no_dynamic_state(
    face: Any, device: torch.device
) -> None:
    weight = ones(2, device=device)
    optimizer = face(sgd([weight]), 8.0, verbose=False)
    for value in (1.0, INF, 1.0):
        optimizer.zero_grad()
        optimizer.backward(pull((weight, value)))
        optimizer.step()
    assert optimizer.cur_iter == 3
    for name in ("last_overflow_iter", "scale_factor", "scale_window"):
        with pytest.raises(AttributeError, match=f"has {name} only if dynamic_loss_scale is True"):
            getattr(optimizer, name)
        assert not hasattr(optimizer, name)


# A subclass as a sequence-to-sequence project of 2019 wrote it, with checkpoints of its own.


class SeedingOptimizer(optimizers.FP16_Optimizer):
    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Any = None,
        verbose: bool = True,
    ) -> None:
        super().__init__(
            init_optimizer, static_loss_scale, dynamic_loss_scale, dynamic_loss_args, verbose
        )

    def state_dict(self) -> dict[str, Any]:
        names = ["dynamic_loss_scale", "cur_scale", "cur_iter"]
        if self.dynamic_loss_scale:
            names += ["last_overflow_iter", "scale_factor", "scale_window"]
        own = {name: getattr(self, name) for name in names}
        return {
            **own,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups_flat": self.fp32_groups_flat,
        }

    def load_state_dict(self, state_dict: Any) -> None:
        saved = dict(state_dict)
        self.optimizer.load_state_dict(saved.pop("optimizer_state_dict"))
        for mine, theirs in zip(self.fp32_groups_flat, saved.pop("fp32_groups_flat"), strict=True):
            mine.data.copy_(theirs.data)
        for name, value in saved.items():
            setattr(self, name, value)


@probes
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_subclass_of_2019_trains_and_resumes(
    dynamic: bool, probe: Any, device: torch.device
) -> None:
    def build() -> tuple[list[Any], Any]:
        params = [parameter([1.0, 2.0], F16, device), parameter([[3.0]], F16, device)]
        return params, SeedingOptimizer(probe(params, lr=0.125), 128.0, dynamic, None, False)

    def train(params: list[Any], optimizer: Any, values: list[float]) -> None:
        for value in values:
            optimizer.zero_grad()
            optimizer.backward(pull(*((param, value) for param in params)))
            optimizer.step()

    params, optimizer = build()
    train(params, optimizer, [2.0**-9, INF, 2.0**-8])
    if dynamic:
        assert (optimizer.cur_scale, optimizer.last_overflow_iter) == (2.0**15, 1)
    resumed_params, resumed = build()
    state = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(state)
    for param, trained in zip(resumed_params, params, strict=True):
        param.data.copy_(trained.data)
    assert resumed.cur_iter == 3
    assert resumed.dynamic_loss_scale is dynamic
    for one, other in ((params, optimizer), (resumed_params, resumed)):
        train(one, other, [2.0**-9, 2.0**-7])
    assert_same(everything(resumed), everything(optimizer))
    assert resumed.cur_scale == optimizer.cur_scale


def test_a_subclass_may_turn_a_dynamic_checkpoint_into_a_dynamic_optimizer(
    device: torch.device,
) -> None:
    dynamic = SeedingOptimizer(sgd([ones(2, device=device)]), dynamic_loss_scale=True)
    dynamic.cur_iter, dynamic.last_overflow_iter = 7, 5
    static = SeedingOptimizer(sgd([ones(2, device=device)]), 4.0)
    static.load_state_dict(dynamic.state_dict())
    assert static.dynamic_loss_scale is True
    assert (static.cur_iter, static.last_overflow_iter, static.cur_scale) == (7, 5, 2.0**16)


# A translation toolkit's own Adam: no torch Optimizer, driven by the legacy call.


class ForeignAdam:
    """Sign descent with the calling conventions of the first FusedAdam."""

    def __init__(self, params: Any, lr: float = 0.25, *, writes: bool = True) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.state: dict[Any, Any] = {}
        self.writes = writes
        self.calls: list[dict[str, Any]] = []

    def step(
        self, closure: Any = None, grads: Any = None, output_params: Any = None, scale: float = 1.0
    ) -> None:
        self.calls.append({"grads": grads, "output_params": output_params, "scale": scale})
        if grads is None:
            lists: Any = [None] * len(self.param_groups)
        else:
            lists = grads if isinstance(grads[0], list) else [grads]
        outputs = output_params if isinstance(output_params[0], list) else [output_params]
        for group, one, copies in zip(self.param_groups, lists, outputs, strict=True):
            for param, grad, output in zip(group["params"], one, copies, strict=True):
                # As there: the gradient given, or else the parameter's own.
                if param.grad is None and grad is None:
                    continue
                grad = param.grad.data if grad is None else grad
                param.data.add_(grad.data.float() / scale, alpha=-group["lr"])
                if self.writes and output is not None:
                    output.data.copy_(param.data)


@faces
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("look", [True, False])
def test_a_foreign_optimizer_is_driven_by_the_legacy_call(
    look: bool, writes: bool, face: Any, device: torch.device
) -> None:
    a, b, unused = ones(2, device=device), ones(2, dtype=F32, device=device), ones(2, device=device)
    inner = ForeignAdam([a, b, unused], writes=writes)
    optimizer = face(inner, 128.0, verbose=False)
    for expected in (0.5, 0.0):
        optimizer.zero_grad(set_to_none=True)
        optimizer.backward(pull((a, 2.0), (b, 2.0)))
        if look:
            assert_grads([inner.param_groups[0]["params"][0].grad], 2.0)
        optimizer.step()
        for param in (a, b):
            assert bool((param == expected).all())
        assert bool((unused == 1.0).all())
    (grads,) = inner.calls[-1]["grads"]
    assert inner.calls[-1]["scale"] == (1.0 if look else 128.0)
    assert_grads(grads, *([2.0, 2.0, None] if look else [256.0, 256.0, None]))
    ((first, second, third),) = inner.calls[-1]["output_params"]
    assert first is a
    assert second is None
    assert third is unused


@faces
def test_a_foreign_optimizer_without_the_legacy_call_reads_grads(
    face: Any, device: torch.device
) -> None:
    class Plain:
        def __init__(self, params: Any) -> None:
            self.param_groups = [{"params": list(params)}]
            self.state: dict[Any, Any] = {}

        def step(self) -> str:
            for param in self.param_groups[0]["params"]:
                param.data.sub_(param.grad, alpha=0.25)
            return "stepped"

    weight = ones(2, device=device)
    optimizer = face(Plain([weight]), 128.0, verbose=False)
    optimizer.backward(pull((weight, 2.0)))
    assert optimizer.step() == "stepped"
    assert bool((weight == 0.5).all())


# Wrong arguments.


def inner() -> Any:
    return sgd([ones(2)])


def complex_inner() -> Any:
    return sgd([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])


WRONG_CALLS: dict[str, tuple[Any, Any, str]] = {
    "none": (lambda face: face(), TypeError, "give the optimizer to wrap"),
    "twice": (lambda face: face(inner(), optimizer=inner()), TypeError, "to wrap once"),
    "a list": (lambda face: face([ones(2)]), TypeError, "is a list; it must be an optimizer"),
    "a module": (lambda face: face(torch.nn.Linear(1, 1)), TypeError, "is a Linear"),
    "wrapped": (
        lambda face: face(face(inner(), verbose=False)),
        TypeError,
        "is an FP16_Optimizer; wrap the inner one",
    ),
    "scale 0": (lambda face: face(inner(), 0.0), ValueError, "scale is 0"),
    "scale -1": (lambda face: face(inner(), -1), ValueError, "scale is -1"),
    "scale inf": (lambda face: face(inner(), INF), ValueError, "scale is inf"),
    "scale a word": (
        lambda face: face(inner(), "dynamic"),
        TypeError,
        "FP16_Optimizer: static_loss_scale is 'dynamic'; it must be a number; for a scale that "
        "adjusts itself give dynamic_loss_scale=True",
    ),
    "a number to go back from": (
        lambda face: face(inner(), verbose=False).backward(3.0),
        TypeError,
        "FP16_Optimizer.backward: loss is a float; it must be a floating tensor",
    ),
    "whole numbers to go back from": (
        lambda face: face(inner(), verbose=False).backward(torch.tensor(3)),
        TypeError,
        "FP16_Optimizer.backward: loss is a torch.int64; it must be a floating tensor",
    ),
    "window 0": (
        lambda face: face(inner(), 1.0, True, {"scale_window": 0}),
        ValueError,
        "scale_window is 0",
    ),
    "misspelt": (
        lambda face: face(inner(), 1.0, True, {"scale_windwo": 10}),
        TypeError,
        "scale_windwo",
    ),
    "clip": (lambda face: face(inner(), clip="none"), ValueError, "clip is 'none'"),
    "complex": (
        lambda face: face(complex_inner()),
        TypeError,
        "[0][0] is of dtype torch.complex64",
    ),
}


@faces
@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_arguments_raise_a_sentence(case: str, face: Any) -> None:
    call, error, words = WRONG_CALLS[case]
    with pytest.raises(error) as raised:
        call(face)
    assert words in str(raised.value)


WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "scale 0": {"static_loss_scale": 0.0},
    "scale a word": {"static_loss_scale": "big"},
    "window 0": {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 0}},
    "misspelt": {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_windwo": 9}},
    "arguments a number": {"dynamic_loss_args": 9},
    "clip": {"clip": "none"},
    "model a word": {"model": "bert"},
}


@faces
@probes
@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_wrong_arguments_leave_the_optimizer_as_it_was(
    case: str, probe: Any, face: Any, device: torch.device
) -> None:
    first, last = ones(2, device=device), ones(3, dtype=F32, device=device)
    inner = probe([{"params": [first]}, {"params": [last]}])
    pull((first, 1.0), (last, 1.0)).backward()
    inner.step()
    state = copy.deepcopy(inner.state_dict())
    with pytest.raises((AttributeError, TypeError, ValueError)):
        face(inner, verbose=False, **WRONG_OPTIONS[case])
    assert inner.param_groups[0]["params"][0] is first
    assert inner.param_groups[1]["params"][0] is last
    assert str(inner.state_dict()) == str(state)
    face(inner, verbose=False)


@faces
def test_a_loss_scale_that_makes_no_sense_is_refused_when_written(
    face: Any, device: torch.device
) -> None:
    for dynamic in (True, False):
        optimizer = face(sgd([ones(2, device=device)]), 8.0, dynamic, verbose=False)
        before = optimizer.loss_scale
        for value in (0.0, -1.0, INF, float("nan")):
            with pytest.raises(ValueError, match="scale is"):
                optimizer.loss_scale = value
            assert optimizer.loss_scale == before


@faces
@probes
def test_old_code_may_ask_what_there_is(probe: Any, face: Any, device: torch.device) -> None:
    optimizer = face(probe([ones(2, device=device)]), verbose=False)
    assert optimizer.__class__.__name__ == "FP16_Optimizer"
    assert "update_master_grads" in inspect.signature(optimizer.backward).parameters
    assert hasattr(optimizer, "update_master_grads")
    assert hasattr(optimizer, "clip_master_grads")
    assert isinstance(optimizer, fp16_utils.FP16_Optimizer)
    assert "lr" in repr(optimizer)


@faces
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_gradients_are_refused_with_a_sentence(
    dtype: torch.dtype, face: Any, device: torch.device
) -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True, device=device, dtype=dtype)
    optimizer = face(sgd(layer.parameters()), verbose=False)
    loss = layer(torch.tensor([1, 2], device=device)).float().sum()
    with pytest.raises(RuntimeError, match=r"FP16_Optimizer: grads\[0\]\[0\] is sparse"):
        optimizer.backward(loss)

"""amp.initialize: what it takes, refuses, prints and returns."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amp_level_cases import BF16, F16, F32, initialize
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from apex_mp import amp, fp16_utils
from apex_mp.amp import _amp_state
from apex_mp.amp.casts import current as _current

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.5)


# Signature, options, print.


def test_the_signature_is_that_of_2019_and_two_keywords_more() -> None:
    signature = inspect.signature(amp.initialize)
    assert {name: p.default for name, p in signature.parameters.items()} == {
        "models": inspect.Parameter.empty,
        "optimizers": None,
        "enabled": True,
        "opt_level": "O1",
        "cast_model_type": None,
        "patch_torch_functions": None,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": None,
        "cast_model_outputs": None,
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
        "dtype": F16,
        "device_type": None,
    }
    keywords = [n for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keywords == ["dtype", "device_type"]
    assert [*inspect.signature(amp.scale_loss).parameters] == [
        *("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")
    ]


TABLE = {
    # level: cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
    "O0": (F32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (F16, False, True, True, "dynamic"),
    "O3": (F16, False, False, False, 1.0),
}


@pytest.mark.parametrize(("level", "row"), TABLE.items(), ids=TABLE.keys())
def test_a_level_stands_for_the_options_of_the_table(level: str, row: tuple[Any, ...]) -> None:
    initialize(linear(), opt_level=level)
    options = _amp_state.opt_properties
    assert options is not None
    assert (options.enabled, options.opt_level) == (True, level)
    assert row == (
        options.cast_model_type,
        options.patch_torch_functions,
        options.keep_batchnorm_fp32,
        options.master_weights,
        options.loss_scale,
    )


PRINTED = """\
Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master weights.

Defaults for this optimization level are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : True
master_weights         : True
loss_scale             : dynamic
Processing user overrides (additional kwargs that are not None)...
After processing overrides, optimization options are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : False
master_weights         : True
loss_scale             : 128.0
"""


def test_it_prints_what_it_always_printed(capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(linear(), opt_level="O2", keep_batchnorm_fp32="False", loss_scale="128.0")
    assert capsys.readouterr().out == PRINTED


OVERRIDES = {
    "loss_scale": (("O1", "loss_scale", 128), 128.0),
    "loss_scale, a string": (("O2", "loss_scale", "128.0"), 128.0),
    "loss_scale, dynamic": (("O0", "loss_scale", "dynamic"), "dynamic"),
    "keep_batchnorm_fp32": (("O3", "keep_batchnorm_fp32", True), True),
    "keep_batchnorm_fp32, True": (("O3", "keep_batchnorm_fp32", "True"), True),
    "keep_batchnorm_fp32, False": (("O2", "keep_batchnorm_fp32", "False"), False),
    "master_weights": (("O2", "master_weights", False), False),
    "cast_model_type": (("O3", "cast_model_type", BF16), BF16),
    "cast_model_type, False": (("O2", "cast_model_type", False), None),
    "cast_model_type of O1": (("O1", "cast_model_type", F32), F32),
    "patch_torch_functions": (("O1", "patch_torch_functions", False), False),
    "cast_model_outputs": (("O1", "cast_model_outputs", F16), F16),
}


@pytest.mark.parametrize(("given", "option"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_an_option_that_is_not_none_overrides_the_level(
    given: tuple[str, str, Any], option: Any
) -> None:
    level, name, value = given
    initialize(linear(), opt_level=level, **{name: value})
    assert getattr(_amp_state.opt_properties, name) == option


# Errors.


def picture(value: Any) -> Any:
    """Everything there is to a model, an optimizer or a container, down to tensors and hooks."""
    if isinstance(value, torch.Tensor):
        grad = None if value.grad is None else picture(value.grad)
        memory = None if value.is_sparse else value.data_ptr()
        return (id(value), value.dtype, memory, value._version, grad, vars(value))
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return (id(value), type(value), picture(vars(value)))
    if isinstance(value, dict):
        return (id(value), [(picture(key), picture(each)) for key, each in value.items()])
    if isinstance(value, (list, tuple)):
        return (id(value), [*map(picture, value)])
    return (id(value), type(value))


class Unchanged:
    """Says that a call left models, optimizers and the process as they were."""

    def __init__(self, *objects: Any) -> None:
        self._objects = objects
        self._before = self._look()

    def _look(self) -> Any:
        handle = _current.handle
        return (
            [picture(each) for each in self._objects],
            picture(vars(_amp_state)),
            (id(handle), handle is not None and handle.is_active()),
            torch.is_autocast_enabled("cpu"),
            (id(nn.functional.linear), id(nn.Module.__call__), id(torch.softmax)),
            len(_global_optimizer_pre_hooks),
        )

    def check(self) -> None:
        assert self._look() == self._before


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "level": (
        {"opt_level": "02"},
        RuntimeError,
        "Unexpected optimization level 02. Options are 'O0', 'O1', 'O2', 'O3'.  Note that in `O0`, "
        "`O1`, etc., the prefix O is the letter O, not the number zero.",
    ),
    "cast_model_type with O1": (
        {"cast_model_type": F16},
        RuntimeError,
        "cast_model_type is torch.float16 with opt_level 'O1'; O1 casts around functions",
    ),
    "keep_batchnorm_fp32 with O1": (
        {"keep_batchnorm_fp32": "False"},
        RuntimeError,
        "keep_batchnorm_fp32 is False with opt_level 'O1'",
    ),
    "master_weights with O1": (
        {"master_weights": True},
        RuntimeError,
        "master_weights is True with opt_level 'O1'",
    ),
    "patch_torch_functions": (
        {"opt_level": "O2", "patch_torch_functions": True},
        RuntimeError,
        "patch_torch_functions is True with opt_level 'O2'; only O1 casts around functions",
    ),
    "keep_batchnorm_fp32": (
        {"opt_level": "O2", "keep_batchnorm_fp32": "yes"},
        TypeError,
        "keep_batchnorm_fp32 is 'yes'; it must be True, False or None",
    ),
    "master_weights": ({"opt_level": "O2", "master_weights": 2}, TypeError, "master_weights is 2"),
    "cast_model_type": (
        {"opt_level": "O2", "cast_model_type": torch.int8},
        TypeError,
        "cast_model_type is torch.int8; it must be a floating torch.dtype",
    ),
    "cast_model_outputs": ({"cast_model_outputs": "half"}, TypeError, "cast_model_outputs is"),
    "loss_scale": ({"loss_scale": "much"}, ValueError, "loss_scale is 'much'; it must be a number"),
    "loss_scale out of range": ({"loss_scale": -1.0}, ValueError, "scale is -1.0; it must lie in"),
    "min_loss_scale": ({"min_loss_scale": -1.0}, ValueError, "min_scale is -1.0"),
    "num_losses": ({"num_losses": 0}, ValueError, "num_losses is 0; it must be at least 1"),
    "dtype": ({"dtype": F32}, ValueError, "dtype is torch.float32; it must be torch.float16 or"),
    "device_type": ({"device_type": "xpu"}, ValueError, "device_type is 'xpu'; it must be"),
}


@pytest.mark.parametrize(("given", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_an_option_out_of_place_is_an_error_and_nothing_is_changed(
    given: dict[str, Any],
    error: type[Exception],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = linear()
    optimizer = sgd(model)
    unchanged = Unchanged(model, optimizer)
    with pytest.raises(error, match=re.escape(message)):
        amp.initialize(model, optimizer, verbosity=2, **{"opt_level": "O1", **given})
    unchanged.check()
    assert capsys.readouterr().out == ""


class Counting:
    """Has groups, but no hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": [*model.parameters()]}]

    def step(self) -> None: ...


class Sharded(torch.optim.SGD):
    """Steps through another optimizer with groups of its own, as ZeroRedundancyOptimizer does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.5)
        self.optim = sgd(model)


class Final(torch.optim.SGD):
    """Cannot get the subclass that optimizers with masters have."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Final has no subclasses")


def two_optimizers(model: nn.Module, odd: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Optimizers of which the second has an odd parameter in its second group."""
    loose = nn.Parameter(odd)
    last = torch.optim.SGD(linear().parameters(), lr=0.5, momentum=0.5)
    last.add_param_group({"params": [nn.Parameter(torch.ones(1)), loose]})
    first = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    first.step()
    return [first, last]


def wrapped_in_ddp(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def through_amp_before(model: nn.Module) -> Any:
    other = linear()
    return amp.initialize(other, sgd(other), opt_level="O0", verbosity=0)[1]


OBJECTS: dict[str, tuple[Callable[[nn.Module], tuple[Any, Any]], type[Exception], str]] = {
    "model": (lambda m: (None, sgd(m)), TypeError, "models must be either a single model or a"),
    "a model of a list": (lambda m: ([m, "m"], sgd(m)), TypeError, "There is a str."),
    "optimizer": (
        lambda m: (m, "SGD"),
        TypeError,
        "optimizers must be either a single optimizer or a list of optimizers.",
    ),
    "parameters for an optimizer": (lambda m: (m, m.parameters()), TypeError, "optimizers must be"),
    "parallel model": (
        lambda m: ([linear(), wrapped_in_ddp(m)], sgd(m)),
        RuntimeError,
        "Incoming model is an instance of <class 'torch.nn.parallel.data_parallel.DataParallel'>. "
        "Parallel wrappers should only be applied to the model(s) AFTER \nthe model(s) have been "
        "returned from amp.initialize.",
    ),
    "FP16_Optimizer": (
        lambda m: (m, [sgd(linear()), fp16_utils.FP16_Optimizer(sgd(linear()), verbose=False)]),
        RuntimeError,
        "An incoming optimizer is an instance of <class 'apex_mp.fp16_utils",
    ),
    "OptimWrapper": (
        lambda m: (m, amp.OptimWrapper(sgd(m), amp.NoOpHandle(), 1)),
        RuntimeError,
        "must be bare",
    ),
    "an optimizer twice": (
        lambda m: (m, [o := sgd(m), o]),
        RuntimeError,
        "A given optimizer should only be passed through amp.initialize once.",
    ),
    "an optimizer again": (
        lambda m: (m, [sgd(linear()), through_amp_before(m)]),
        RuntimeError,
        "A given optimizer should only be passed through amp.initialize once.",
    ),
    "an optimizer without hooks": (
        lambda m: (m, [sgd(linear()), Counting(m)]),
        TypeError,
        "an optimizer is a Counting; for float32 masters it must be a torch.optim.Optimizer",
    ),
    "a scripted model": (
        lambda m: (torch.jit.script(m), sgd(m)),
        RuntimeError,
        "a model is a RecursiveScriptModule, which has no hooks for the casts of opt_level 'O2'",
    ),
    "a scripted part": (
        lambda m: (nn.Sequential(linear(), torch.jit.script(m)), sgd(m)),
        RuntimeError,
        "1 is a RecursiveScriptModule",
    ),
    "an optimizer around one of its own parameters": (
        lambda m: (m, [sgd(linear()), Sharded(m)]),
        TypeError,
        "amp.initialize: Sharded steps its parameters by its optim, of type SGD, which has lists",
    ),
    "a model made in inference mode": (
        lambda m: ([m, torch.inference_mode()(linear)()], sgd(m)),
        TypeError,
        "amp.initialize: the parameter weight was made in torch.inference_mode, so it cannot be",
    ),
    "an optimizer without subclasses": (
        lambda m: (m, [sgd(linear()), Final(m.parameters(), lr=1.0)]),
        TypeError,
        "Final has no subclasses",
    ),
    **{
        f"a parameter that {reason}": (
            lambda m, odd=odd: (m, two_optimizers(m, odd)),
            TypeError,
            f"amp.initialize: params[1][1] {reason}",
        )
        for reason, odd in {
            "is sparse": torch.ones(2).to_sparse(),
            "is on meta": torch.ones(2, device="meta"),
        }.items()
    },
}


@pytest.mark.parametrize(("objects", "error", "message"), OBJECTS.values(), ids=OBJECTS.keys())
def test_an_object_out_of_place_is_an_error_and_nothing_is_changed(
    objects: Any, error: type[Exception], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = linear()
    models, optimizers = objects(model)
    listed = optimizers if isinstance(optimizers, list) else [optimizers]
    unchanged = Unchanged(model, *listed)
    with pytest.raises(error, match=re.escape(message)):
        amp.initialize(models, optimizers, opt_level="O2", verbosity=2)
    unchanged.check()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("before", ["O0", "O1", "O2"])
def test_a_registered_function_that_is_gone_is_refused_and_nothing_is_changed(before: str) -> None:
    module = types.ModuleType("theirs")
    module.function = torch.exp  # type: ignore[attr-defined]
    initialize(linear(), opt_level=before)
    amp.register_half_function(module, "function")
    del module.function
    model = linear()
    optimizer = sgd(model)
    unchanged = Unchanged(model, optimizer)
    message = "amp.init: the function named function, registered in <module 'theirs'>, cannot be"
    for call in (
        lambda: initialize(model, optimizer, opt_level="O1", verbosity=2),
        lambda: amp.init(device_type="cpu"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
        unchanged.check()


# enabled=False.


def test_enabled_false_leaves_everything_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model = linear().half()  # Even what is refused otherwise.
    optimizer = sgd(model)
    model_before, optimizer_before = sorted(vars(model)), sorted(vars(optimizer))
    result = amp.initialize(model, optimizer, enabled=False, opt_level="no such")
    assert result == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    assert (sorted(vars(model)), sorted(vars(optimizer))) == (model_before, optimizer_before)
    loss = model(torch.ones(2, 2).half()).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    with amp.disable_casts():
        pass
    assert [*amp.master_params(optimizer)] == [*model.parameters()]
    assert amp.state_dict() == {}
    assert capsys.readouterr().out == ""

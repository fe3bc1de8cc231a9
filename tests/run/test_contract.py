"""The twelve points in which old code relies on apex, each by the names and calls of that code.

`tests/old_scripts/README.md` says what they are, and which other tests look into each further.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import apex_mp

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "old_scripts" / "README.md").read_text(encoding="utf-8")
ERAS = ("2019-03", "2019-08", "2020")


@pytest.fixture(params=ERAS)
def era(request: pytest.FixtureRequest) -> Iterator[str]:
    apex_mp.install_as_apex(request.param)
    yield request.param
    apex_mp.uninstall_as_apex()


@pytest.fixture
def as_apex() -> Iterator[None]:
    apex_mp.install_as_apex()
    yield
    apex_mp.uninstall_as_apex()


def module(name: str) -> Any:
    return importlib.import_module(name)


def fp16_optimizer_of(era: str) -> Any:
    home = "apex.contrib.optimizers" if era == "2020" else "apex.optimizers"
    return module(home).FP16_Optimizer


def half_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).half()


def loss_of(model: nn.Module) -> Any:
    x = torch.linspace(-1, 1, 15).view(5, 3).to(next(model.parameters()).dtype)
    return model(x).float().pow(2).sum()


# 1


def forms(given: list[Any]) -> dict[str, Any]:
    """The forms in which a step's tensors, of two groups of two, are handed over."""
    return {
        "flat list": [*given],
        "list of lists": [given[:2], given[2:]],
        "generator": (one for one in given),
    }


@pytest.mark.parametrize("form", forms([0, 0, 0, 0]))
@pytest.mark.parametrize("norms", [False, True])
def test_1_the_fused_step_takes_lists_lists_of_lists_and_generators(
    form: str, norms: bool, era: str
) -> None:
    def make() -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(torch.ones(size)) for size in (3, 2, 4, 1)]
        groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]
        of_era = module("apex.optimizers").FusedAdam
        options = {"max_grad_norm": 1.0} if norms else {}
        return params, of_era(groups, lr=0.1, **options)

    scale = 64.0
    grads = [torch.arange(1.0, 1 + size) for size in (3, 2, 4, 1)]
    params, optimizer = make()
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    others, optimizer = make()
    copies = [torch.zeros(size, dtype=torch.float16) for size in (3, 2, 4, 1)]
    scaled = [grad * scale for grad in grads]
    given: dict[str, Any] = {"scale": scale}
    if norms:
        given["grad_norms"] = [
            torch.cat(scaled[:2]).norm().item(), torch.cat(scaled[2:]).norm().item(),
        ]  # fmt: skip
    optimizer.step(grads=forms(scaled)[form], output_params=forms(copies)[form], **given)
    for param, other, copy in zip(params, others, copies, strict=True):
        torch.testing.assert_close(other, param)
        assert torch.equal(copy, other.detach().half())


# 2


class Foreign:
    """An optimizer of the user's own, which does not derive from torch's."""

    def __init__(self, params: Any) -> None:
        self.param_groups, self.state = [{"params": [*params], "lr": 0.1}], {}

    def step(
        self, closure: Any = None, grads: Any = None, output_params: Any = None, scale: float = 1.0
    ) -> None:
        grads, outputs = (x[0] if isinstance(x[0], list) else x for x in (grads, output_params))
        for param, grad, output in zip(self.param_groups[0]["params"], grads, outputs, strict=True):
            param.data.sub_(grad.float() / scale, alpha=0.1)
            output.data.copy_(param.data)

    def zero_grad(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}


INNER: dict[str, Any] = {
    "FusedAdam": lambda params: module("apex.optimizers").FusedAdam(params, lr=0.02),
    "of torch": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "with the legacy call": Foreign,
}


@pytest.mark.parametrize("inner", INNER)
def test_2_fp16_optimizer_drives_every_kind_of_optimizer(inner: str, era: str) -> None:
    for make in (fp16_optimizer_of(era), module("apex.fp16_utils").FP16_Optimizer):
        model = half_model()
        optimizer = make(INNER[inner](model.parameters()), static_loss_scale=128.0, verbose=False)
        losses = []
        for _ in range(20):
            loss = loss_of(model)
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]


# 3

FUSED_KEYS = {
    "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor",
    "scale_window", "optimizer_state_dict", "fp32_groups_flat",
}  # fmt: skip
PLAIN_KEYS = {
    "loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step",
    "optimizer_state_dict", "fp32_from_fp16",
}  # fmt: skip


@pytest.mark.usefixtures("as_apex")
def test_3_a_subclass_reads_and_writes_what_is_private() -> None:
    class State(module("apex.optimizers").FP16_Optimizer):  # type: ignore[misc]
        def load(self, kept: dict[str, Any]) -> None:
            self.dynamic_loss_scale = kept["dynamic_loss_scale"]
            self.cur_scale, self.cur_iter = kept["cur_scale"], kept["cur_iter"]
            self.last_overflow_iter = kept["last_overflow_iter"]
            self.scale_factor, self.scale_window = kept["scale_factor"], kept["scale_window"]
            self.optimizer.load_state_dict(kept["optimizer_state_dict"])
            for current, saved in zip(self.fp32_groups_flat, kept["fp32_groups_flat"], strict=True):
                current.data.copy_(saved.data)

    adam = module("apex.optimizers").FusedAdam
    models = [half_model() for _ in range(2)]
    first, second = (State(adam(m.parameters(), lr=0.1), 1.0, True, None, False) for m in models)
    for _ in range(25):
        first.backward(loss_of(models[0]))
        first.step()
        first.zero_grad()
    state = first.state_dict()
    assert state.keys() >= FUSED_KEYS
    assert 0 < state["cur_scale"] < 2.0**32
    second.load(state)
    assert second.cur_scale == state["cur_scale"]
    for mine, theirs in zip(second.fp32_groups_flat, first.fp32_groups_flat, strict=True):
        assert torch.equal(mine, theirs)
    plain = module("apex.fp16_utils").FP16_Optimizer(
        torch.optim.SGD(half_model().parameters(), lr=0.1), dynamic_loss_scale=True, verbose=False
    )
    assert plain.state_dict().keys() >= PLAIN_KEYS


# 4


@pytest.mark.parametrize("face", ["apex.optimizers", "apex.fp16_utils"])
@pytest.mark.usefixtures("as_apex")
def test_4_groups_stay_the_same_dicts_and_schedulers_made_before_go_on(face: str) -> None:
    model = half_model()
    inner = module("apex.optimizers").FusedAdam(model.parameters(), lr=0.1)
    groups = [*inner.param_groups]
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = module(face).FP16_Optimizer(inner, verbose=False)
    assert all(map(lambda a, b: a is b, optimizer.param_groups, groups))
    for wanted in (0.1, 0.05, 0.025):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted)
        optimizer.backward(loss_of(model))
        optimizer.step()
        scheduler.step()


# 5


@pytest.mark.parametrize("inner", ["FusedAdam", "of torch"])
@pytest.mark.parametrize("face", ["apex.optimizers", "apex.fp16_utils"])
@pytest.mark.usefixtures("as_apex")
def test_5_a_gradient_may_be_none_at_any_step(face: str, inner: str) -> None:
    used, sometimes = (nn.Parameter(torch.ones(2).half()) for _ in range(2))
    never = nn.Parameter(torch.ones(2).half())
    optimizer = module(face).FP16_Optimizer(
        INNER[inner]([never, sometimes, used]), static_loss_scale=8.0, verbose=False
    )
    for step in range(4):
        before = sometimes.detach().clone()
        optimizer.zero_grad(True)
        loss = used.float().sum() + (sometimes.float().sum() if step % 2 else 0.0)
        optimizer.backward(loss)
        optimizer.step()
        assert torch.equal(sometimes, before) == (step % 2 == 0)
    assert torch.equal(never, torch.ones(2).half())
    assert bool((used < 1).all())


# 6


@pytest.mark.parametrize("face", ["apex.optimizers", "apex.fp16_utils"])
@pytest.mark.usefixtures("as_apex")
def test_6_a_loss_that_is_nan_over_finite_gradients_is_no_overflow(face: str) -> None:
    weight = nn.Parameter(torch.ones(2).half())
    optimizer = module(face).FP16_Optimizer(
        torch.optim.SGD([weight], lr=0.5), dynamic_loss_scale=True, verbose=False,
        dynamic_loss_args={"init_scale": 16.0},
    )  # fmt: skip
    optimizer.backward(weight.float().sum() + torch.tensor(float("nan")))
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    scale = optimizer.cur_scale if face == "apex.optimizers" else optimizer.loss_scale
    assert scale == 16.0


# 7


def test_7_init_is_called_again_after_decorators_beside_a_half_model(era: str) -> None:
    amp = module("apex.amp")
    seen: list[torch.dtype] = []

    @amp.half_function
    def halved(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x

    holder = type("Library", (), {"widen": staticmethod(lambda x: x)})
    amp.register_float_function(holder, "widen")
    handles = [amp.init(enable_caching=True), amp.init(), amp.init(verbose=False)]
    halved(torch.ones(1))
    assert seen == [torch.float16]
    assert holder.widen(torch.ones(1).half()).dtype == torch.float32
    model = half_model()
    optimizer = fp16_optimizer_of(era)(
        module("apex.optimizers").FusedAdam(model.parameters(), lr=0.1),
        static_loss_scale=16.0, verbose=False,
    )  # fmt: skip
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.backward(loss_of(model))
    handles[-1]._clear_cache()
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))
    assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float16
    assert handles[-1].is_active()


# 8


def test_8_what_is_private_in_handles_and_wrappers_is_there(era: str) -> None:
    handle = module("apex.amp").init()
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = handle.wrap_optimizer(inner, num_loss=2)
    assert wrapper._optimizer is inner
    before = model(torch.ones(1, 2)).detach()
    with torch.no_grad():
        model.weight.add_(1.0)
    handle._clear_cache()
    assert not torch.equal(model(torch.ones(1, 2)), before)
    handle._deactivate()
    assert not handle.is_active()
    assert model(torch.ones(1, 2)).dtype == torch.float32
    other = module("apex.amp").init(enabled=False)
    assert other.wrap_optimizer(inner)._optimizer is inner
    other._clear_cache()
    other._deactivate()


# 9


@pytest.mark.parametrize(
    ("era", "names"),
    [
        ("2019-03", ["enabled", "enable_caching", "verbose", "allow_banned"]),
        ("2019-08", ["enabled", "loss_scale", "enable_caching", "verbose", "allow_banned"]),
        ("2020", ["enabled", "loss_scale", "enable_caching", "verbose", "allow_banned"]),
    ],
    indirect=["era"],
)
def test_9_init_takes_its_arguments_in_the_order_of_the_era(era: str, names: list[str]) -> None:
    init = module("apex.amp").init
    assert [*inspect.signature(init).parameters][: len(names)] == names
    given = {
        "enabled": True,
        "loss_scale": 32.0,
        "enable_caching": False,
        "verbose": True,
        "allow_banned": True,
    }
    handle = init(*(given[name] for name in names))
    assert (handle.has_cache, handle.verbose) == (False, True)
    assert handle._default_scaler.loss_scale() == (32.0 if "loss_scale" in names else 2.0**16)


@pytest.mark.parametrize("enable", [False, True])
def test_9_init_takes_enable_as_published(era: str, enable: bool) -> None:
    handle = module("apex.amp").init(enable=enable)
    assert handle.is_active() is enable


# 10


@pytest.mark.parametrize(
    ("era", "scale"),
    [("2019-03", 2.0**32), ("2019-08", 2.0**16), ("2020", 2.0**16)],
    indirect=["era"],
)
def test_10_the_fused_fp16_optimizer_starts_at_the_scale_of_the_era(era: str, scale: float) -> None:
    inner = torch.optim.SGD(half_model().parameters(), lr=0.1)
    optimizer = fp16_optimizer_of(era)(inner, dynamic_loss_scale=True, verbose=False)
    assert optimizer.cur_scale == scale


# 11

STAR = (
    "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads "
    "master_params_to_model_params tofp16 to_python_float clip_grad_norm convert_module "
    "convert_network FP16Model FP16_Optimizer LossScaler DynamicLossScaler"
)
PATHS = (
    "apex apex.RNN apex.amp apex.amp._amp_state apex.amp.lists.functional_overrides "
    "apex.amp.lists.tensor_overrides apex.amp.lists.torch_overrides apex.amp.scaler "
    "apex.contrib.optimizers apex.fp16_utils apex.fp16_utils.fp16_optimizer "
    "apex.fp16_utils.fp16util apex.fp16_utils.loss_scaler apex.multi_tensor_apply "
    "apex.normalization apex.normalization.fused_layer_norm apex.optimizers "
    "apex.optimizers.fp16_optimizer apex.optimizers.fused_adam apex.optimizers.fused_lamb "
    "apex.parallel apex.parallel.LARC apex.parallel.distributed apex.parallel.sync_batchnorm "
    "apex.reparameterization amp_C apex_C fused_adam_cuda fused_layer_norm_cuda"
)


def test_11_every_path_can_be_imported_and_the_star_has_14_names(era: str) -> None:
    for path in PATHS.split():
        assert module(path).__name__ == path
    names: dict[str, Any] = {}
    exec("from apex.fp16_utils import *", names)
    assert {name for name in names if name != "__builtins__"} == set(STAR.split())
    assert len(STAR.split()) == 14


# 12


def test_12_a_library_that_finds_apex_can_train_with_it(era: str) -> None:
    """Many ask for the spec, and then take amp for granted."""
    assert importlib.util.find_spec("apex") is not None
    names: dict[str, Any] = {}
    exec("from apex import amp\nfrom apex.optimizers import FusedAdam", names)
    if era == "2020":  # It lasted to 2025: a library that takes its norm gets a whole one.
        exec("from apex.normalization import FusedRMSNorm", names)
        assert names["FusedRMSNorm"](2).half()(torch.ones(1, 2).half()).dtype is torch.float16
    else:
        with pytest.raises(ImportError):  # It then takes its own.
            exec("from apex.normalization import FusedRMSNorm")
    model = nn.Linear(2, 2)
    model, optimizer = names["amp"].initialize(
        model, names["FusedAdam"](model.parameters(), lr=0.1), opt_level="O1", verbosity=0
    )
    with names["amp"].scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
        scaled.backward()
    nn.utils.clip_grad_norm_(names["amp"].master_params(optimizer), 1.0)
    optimizer.step()
    assert set(names["amp"].state_dict()) == {"loss_scaler0"}


# The table


def test_every_test_and_script_that_the_table_names_is_there() -> None:
    rows = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TABLE)
    assert len(rows) > 40
    for file, name in rows:
        tree = ast.parse(next(TESTS.glob(f"*/{file}")).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"


def test_the_table_has_every_script_and_every_point() -> None:
    named = set(re.findall(r"`(\w+\.py)`", TABLE))
    assert {path.name for path in (TESTS / "old_scripts").glob("*.py")} <= named
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    points = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for point in (name for name in points if re.match(r"test_\d+_", name)):
        assert f"`test_contract.py::{point}`" in TABLE

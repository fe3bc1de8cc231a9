"""The name `apex`: what each era has, what is refused, and that it goes without a trace."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import apex_mp
from apex_mp._as_apex.eras import ERAS
from apex_mp._as_apex.table import MISSING, MODULES
from apex_mp.amp.casts import current as _current

pytestmark = pytest.mark.cpu_only


# The contract: what old scripts import.
CONTRACT = [
    "apex",
    "apex.amp",
    "apex.amp._amp_state",
    "apex.amp.scaler",
    "apex.amp.lists.functional_overrides",
    "apex.amp.lists.tensor_overrides",
    "apex.amp.lists.torch_overrides",
    "apex.fp16_utils",
    "apex.fp16_utils.fp16util",
    "apex.fp16_utils.loss_scaler",
    "apex.fp16_utils.fp16_optimizer",
    "apex.optimizers",
    "apex.optimizers.fused_adam",
    "apex.optimizers.fp16_optimizer",
    "apex.optimizers.fused_lamb",
    "apex.contrib.optimizers",
    "apex.normalization",
    "apex.normalization.fused_layer_norm",
    "apex.parallel",
    "apex.parallel.LARC",
    "apex.parallel.distributed",
    "apex.parallel.sync_batchnorm",
    "apex.multi_tensor_apply",
    "apex.reparameterization",
    "apex.RNN",
    "amp_C",
    "apex_C",
    "fused_adam_cuda",
    "fused_layer_norm_cuda",
]
STAR = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    yield
    apex_mp.uninstall_as_apex()


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


# What can be imported


@pytest.mark.parametrize("era", ERAS)
def test_every_module_of_the_contract_and_every_name_of_the_table_is_there(era: str) -> None:
    apex_mp.install_as_apex(era)
    for name in {*CONTRACT, *MODULES}:
        module = importlib.import_module(name)
        assert module.__name__ == name
        wanted = {n for names in MODULES[name].values() for n in names.split()}
        wanted |= set(MISSING.get(name, {}))
        absent = {n for place, n in ERAS[era].absent if place == name}
        missing = wanted - set(vars(module))
        assert missing == absent & wanted, name


MORE_PATHS = """
import apex
apex.RNN.LSTM, apex.RNN.models.mLSTM, apex.reparameterization.apply_weight_norm
from apex.amp import _initialize, _process_optimizer, compat, rnn_compat, utils, wrap
from apex.amp.__version__ import VERSION
from apex.amp._process_optimizer import AmpOptimizerState
from apex.amp.utils import maybe_half
from apex.amp.wrap import make_cast_wrapper
from apex.contrib.optimizers.fused_lamb import FusedLAMB
from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction, FusedLayerNormFunction
from apex.parallel.distributed import apply_flat_dist_call, extract_tensors, flat_dist_call
from apex.parallel.distributed import split_half_float_double
from apex.RNN import RNNBackend, cells
from apex.RNN.cells import mLSTMRNNCell
from apex.RNN.models import toRNNBackend
from apex.reparameterization.reparameterization import Reparameterization
"""


@pytest.mark.parametrize("era", ERAS)
def test_paths_that_few_scripts_import_are_there_too(era: str) -> None:
    apex_mp.install_as_apex(era)
    names: dict[str, Any] = {}
    exec(MORE_PATHS, names)
    assert names["VERSION"] == (0, 1, 0)
    assert names["FusedLAMB"] is apex_mp.optimizers.FusedLAMB
    assert names["toRNNBackend"](names["mLSTMRNNCell"](1, 2), 1).rnns[0].hidden_size == 2


def test_the_helpers_of_amp_do_what_they_did() -> None:
    apex_mp.install_as_apex()
    utils: Any = importlib.import_module("apex.amp.utils")
    compat: Any = importlib.import_module("apex.amp.compat")
    x, wide = torch.ones(1), torch.ones(1).double()
    half = utils.maybe_half([x, (wide, 3)])
    assert (utils.type_string(half[0]), half[1][0] is wide) == ("HalfTensor", True)
    assert utils.type_string(utils.maybe_float(half[0])) == "FloatTensor"
    assert utils.is_fp_tensor([x, [x.half()]])
    assert not utils.is_fp_tensor([x, x.int()])
    assert [*utils.as_inplace(["exp"])] == ["exp_"]
    functions: dict[str, Any] = {}
    utils.set_func(functions, "exp", torch.exp)
    assert utils.get_func(functions, "exp") is utils.get_func(torch, "exp")
    assert not utils.has_func(functions, "log")
    assert utils.is_cuda_enabled() == bool(utils.get_cuda_version())
    assert compat.filter_attrs(torch, ["exp", "nothing"]) == ["exp"]
    assert compat.scalar_python_val(x) == compat.scalar_python_val([1.0]) == 1.0
    assert compat.is_tensor_like(x)
    assert compat.is_floating_point(x)


# What scripts import beside amp and FP16_Optimizer.
LIBRARIES = {
    "parallel": "DistributedDataParallel ReduceOp Reducer SyncBatchNorm convert_syncbn_model "
    "create_syncbn_process_group LARC.LARC multiproc.main",
    "parallel.distributed": "DistributedDataParallel Reducer apply_flat_dist_call extract_tensors "
    "flat_dist_call split_by_type split_half_float_double",
    "normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "normalization.fused_layer_norm": "fused_layer_norm fused_layer_norm_affine fused_rms_norm "
    "fused_rms_norm_affine mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine",
    "RNN": "LSTM GRU ReLU Tanh mLSTM models.toRNNBackend",
    "reparameterization": "apply_weight_norm remove_weight_norm apply_reparameterization "
    "remove_reparameterization Reparameterization WeightNorm",
}


@pytest.mark.parametrize(("module", "names"), LIBRARIES.items())
def test_a_name_of_the_other_libraries_is_one_under_apex_and_under_apex_mp(
    module: str, names: str
) -> None:
    apex_mp.install_as_apex("2020")
    for path in names.split():
        place, _, name = f"{module}.{path}".rpartition(".")
        ours, theirs = (importlib.import_module(f"{root}.{place}") for root in ("apex_mp", "apex"))
        assert getattr(theirs, name) is getattr(ours, name)
        assert callable(getattr(ours, name))


def test_a_star_import_of_fp16_utils_has_the_14_names() -> None:
    apex_mp.install_as_apex()
    names: dict[str, Any] = {}
    exec("from apex.fp16_utils import *", names)
    assert sorted(name for name in names if not name.startswith("__")) == STAR


def test_a_name_of_another_era_is_named_on_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    apex_mp.install_as_apex()
    for _ in range(2):
        with pytest.raises(ImportError, match="no FusedLAMB as of '2019-03'"):
            exec("from apex.optimizers import FusedLAMB")
    assert capsys.readouterr().err == (
        "install_as_apex: apex.optimizers has no FusedLAMB as of '2019-03', but as of '2019-08' "
        "and '2020'; install_as_apex(era='2019-08') gives it\n"
    )


def test_what_is_not_here_says_at_its_use_what_to_take_instead() -> None:
    apex_mp.install_as_apex("2020")
    function: Any = importlib.import_module(
        "apex.parallel.sync_batchnorm_kernel"
    ).SyncBatchnormFunction
    with pytest.raises(NotImplementedError, match=r"SyncBatchnormFunction is not in apex_mp; use "):
        function(params(), eps=0.1)

    class Mine(function):  # type: ignore[misc]
        pass

    with pytest.raises(NotImplementedError, match="SyncBatchnormFunction is not in apex_mp"):
        Mine()
    assert not isinstance(1, function)


@pytest.mark.parametrize(
    ("era", "module", "name", "sentence"),
    [
        (
            "2019-03", "apex.optimizers", "FusedLAMB",
            "apex.optimizers has no FusedLAMB as of '2019-03', but as of '2019-08' and '2020'; "
            "install_as_apex(era='2019-08') gives it",
        ),
        (
            "2019-03", "amp_C", "multi_tensor_lamb",
            "amp_C has no multi_tensor_lamb as of '2019-03', but as of '2019-08' and '2020'; "
            "install_as_apex(era='2019-08') gives it",
        ),
        (
            "2019-08", "apex.optimizers", "FusedAdagrad",
            "apex.optimizers has no FusedAdagrad as of '2019-08', but as of '2020'; "
            "install_as_apex(era='2020') gives it",
        ),
        (
            "2020", "apex.optimizers", "FP16_Optimizer",
            "apex.optimizers has no FP16_Optimizer as of '2020', but as of '2019-03' and "
            "'2019-08'; install_as_apex(era='2019-03') gives it",
        ),
    ],
)  # fmt: skip
def test_a_name_of_another_era_says_which(era: str, module: str, name: str, sentence: str) -> None:
    apex_mp.install_as_apex(era)
    with pytest.raises(ImportError) as not_imported:
        exec(f"from {module} import {name}")
    assert str(not_imported.value) == sentence
    there = importlib.import_module(module)
    with pytest.raises(AttributeError) as not_found:
        getattr(there, name)
    assert str(not_found.value) == sentence
    assert not hasattr(there, name)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = there.nothing


@pytest.mark.parametrize("era", ERAS)
def test_dir_a_star_import_and_the_table_agree_on_the_names_of_an_era(era: str) -> None:
    apex_mp.install_as_apex(era)
    for name in MODULES:
        module = importlib.import_module(name)
        of_table = {n for names in MODULES[name].values() for n in names.split()}
        of_table |= set(MISSING.get(name, {}))
        wanted = {n for n in of_table if (name, n) not in ERAS[era].absent and n[:2] != "__"}
        children = {other.rpartition(".")[2] for other in MODULES if other.startswith(f"{name}.")}
        assert {n for n in dir(module) if not n.startswith("__")} - children == wanted - children
        if wanted:
            star: dict[str, Any] = {}
            exec(f"from {name} import *", star)
            assert set(star) - {"__builtins__"} == {n for n in wanted if n[0] != "_"}


# Eras


@pytest.fixture
def handle() -> Iterator[None]:
    yield
    if _current.handle is not None:
        _current.handle._deactivate()


@pytest.mark.usefixtures("handle")
def test_the_order_of_init_is_that_of_the_era() -> None:
    apex_mp.install_as_apex()
    init: Any = importlib.import_module("apex.amp").init
    assert [*inspect.signature(init).parameters][:4] == [
        "enabled", "enable_caching", "verbose", "allow_banned",
    ]  # fmt: skip
    # 0 is no loss scale here, but caching switched off.
    handle = init(True, 0, True, device_type="cpu")
    assert (handle.has_cache, handle.verbose) == (False, True)
    assert handle._default_scaler.dynamic
    apex_mp.uninstall_as_apex()
    apex_mp.install_as_apex("2019-08")
    later: Any = importlib.import_module("apex.amp").init
    handle = later(True, 128.0, False, device_type="cpu")
    assert handle._default_scaler.loss_scale() == 128.0
    assert not handle.has_cache


@pytest.mark.parametrize("scale", [128.0, 1.0, 128, "dynamic"])
def test_a_loss_scale_where_caching_stood_is_refused(scale: Any) -> None:
    apex_mp.install_as_apex()
    init: Any = importlib.import_module("apex.amp").init
    with pytest.raises(TypeError) as raised:
        init(True, scale)
    assert str(raised.value) == (
        f"amp.init: enable_caching, the second argument as of 2019-03, is {scale!r}; it must be "
        f"True or False. If it is meant as the loss scale, say loss_scale={scale!r}, or have apex "
        "as of 2019-08, where that came second"
    )
    assert _current.handle is None


def test_fused_adam_takes_its_arguments_in_the_order_of_the_era() -> None:
    apex_mp.install_as_apex()
    early: Any = importlib.import_module("apex.optimizers").FusedAdam
    group = early(params(), 0.1, True, (0.9, 0.99), 1e-6, True, 0.5, 2.0).param_groups[0]
    assert (group["eps_inside_sqrt"], group["weight_decay"], group["max_grad_norm"]) == (
        True, 0.5, 2.0,
    )  # fmt: skip
    apex_mp.uninstall_as_apex()
    apex_mp.install_as_apex("2019-08")
    later: Any = importlib.import_module("apex.optimizers").FusedAdam
    optimizer = later(params(), 0.1, True, (0.9, 0.99), 1e-6, False, 0.5)
    group = optimizer.param_groups[0]
    assert (group["adam_w_mode"], group["weight_decay"]) == (False, 0.5)
    assert (group["eps_inside_sqrt"], group["max_grad_norm"]) == (False, 0.0)
    assert later.__name__ == "FusedAdam"
    assert optimizer.multi_tensor_adam is not None


@pytest.mark.filterwarnings("ignore:GradScaler. FusedAdam steps 2 parameters of float16")
@pytest.mark.parametrize(("era", "later"), [("2019-03", False), ("2019-08", True), ("2020", True)])
def test_o3_saves_and_fused_adam_leaves_what_they_did_in_each_era(era: str, later: bool) -> None:
    apex_mp.install_as_apex(era)
    amp = importlib.import_module("apex.amp")
    model = torch.nn.Linear(2, 2)
    optimizer = importlib.import_module("apex.optimizers").FusedAdam(model.parameters(), lr=0.1)
    assert amp.initialize([model], [optimizer], opt_level="O3", verbosity=0) == (
        [model],
        [optimizer],
    )
    assert model.weight.dtype == torch.float16
    saved = model.state_dict()["weight"].dtype
    assert saved == (torch.float32 if later else torch.float16)
    scaler = apex_mp.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for param in model.parameters():
        param.grad = torch.full_like(param, 16.0)
    scaler.step(optimizer)
    assert model.weight.grad is not None
    assert model.weight.grad.unique().item() == (2.0 if later else 16.0)


# Refusals


def test_an_unknown_era_is_refused() -> None:
    with pytest.raises(ValueError, match="era is '2018'; it must be one of '2019-03'"):
        apex_mp.install_as_apex("2018")
    assert importlib.util.find_spec("apex") is None


@pytest.fixture
def real_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "apex"
    (package / "amp").mkdir(parents=True)
    (package / "__init__.py").write_text("real = True\n")
    (package / "amp" / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("apex", "apex.amp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return package


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_apex_is_hidden_by_force_only_and_comes_back(
    imported: bool, real_apex: Path
) -> None:
    if imported:
        importlib.import_module("apex.amp")
    before = dict(sys.modules)
    with pytest.raises(RuntimeError, match=r"apex can be imported already, from .*__init__\.py"):
        apex_mp.install_as_apex()
    assert sys.modules == before
    apex_mp.install_as_apex(force=True)
    assert not hasattr(importlib.import_module("apex.amp"), "real")
    apex_mp.uninstall_as_apex()
    assert sys.modules == before
    assert importlib.import_module("apex.amp").real
    for name in ("apex.amp", "apex"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("era", "module", "scale"),
    [
        ("2019-03", "apex.optimizers", 2.0**32),
        ("2019-03", "apex.optimizers.fp16_optimizer", 2.0**32),
        ("2019-08", "apex.optimizers", 2.0**16),
        ("2020", "apex.contrib.optimizers", 2.0**16),
        ("2019-03", "apex.fp16_utils", 2.0**32),
    ],
)
def test_the_dynamic_scale_starts_where_it_did(era: str, module: str, scale: float) -> None:
    apex_mp.install_as_apex(era)
    make: Any = importlib.import_module(module).FP16_Optimizer
    optimizer = make(torch.optim.SGD(params(), lr=0.1), dynamic_loss_scale=True, verbose=False)
    assert optimizer.cur_scale == scale
    assert optimizer.__class__.__name__ == "FP16_Optimizer"
    assert isinstance(optimizer, apex_mp.fp16_utils.FP16_Optimizer)
    given = make(torch.optim.SGD(params(), lr=0.1), 1.0, True, {"init_scale": 8.0}, verbose=False)
    assert given.cur_scale == 8.0


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_the_later_fused_adam_clears_gradients_as_it_was_asked(set_grad_none: bool) -> None:
    apex_mp.install_as_apex("2020")
    make: Any = importlib.import_module("apex.optimizers").FusedAdam
    (param,) = given = params()
    optimizer = make(given, set_grad_none=set_grad_none)
    param.grad = torch.ones(2)
    optimizer.zero_grad()
    assert (param.grad is None) == set_grad_none

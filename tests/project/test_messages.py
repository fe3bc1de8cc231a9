"""Wrong calls, each with the beginning of its message."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import apex_mp
from apex_mp import RNN, amp, checkpoint, convert, loss_scale, normalization
from apex_mp import reparameterization as rp
from apex_mp._as_apex import contrib
from apex_mp.fp16_utils import FP16_Optimizer
from apex_mp.loss_scale_manager import FixedLossScaleManager, LossScaleOptimizer
from apex_mp.monitor import History, Monitor, find_nonfinite
from apex_mp.multi_tensor_apply import amp_C, apex_C
from apex_mp.normalization import fused_layer_norm_cuda
from apex_mp.optimizers import FusedAdam, MasterWeights
from apex_mp.parallel.LARC import LARC
from apex_mp.scale.amp_scaler import LossScaler

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("amp_off")]

HALF, ONE, FLAG = torch.float16, torch.ones(2), torch.zeros(1, dtype=torch.int32)
DOUBLES, LINEAR, SCALER = ONE.double(), nn.Linear(2, 2), amp.GradScaler("cpu")
LOSS = ONE.sum().requires_grad_()
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def sgd(*params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params or [nn.Parameter(torch.ones(2))], lr=0.1)


def adam(**options: Any) -> FusedAdam:
    return FusedAdam([nn.Parameter(torch.ones(2))], **options)


def half_param() -> nn.Parameter:
    return nn.Parameter(torch.ones(2).half())


def fp16(inner: Any, **options: Any) -> FP16_Optimizer:
    return FP16_Optimizer(inner, verbose=False, **options)


def lstm() -> Any:
    return RNN.LSTM(2, 2, 1)


def managed() -> LossScaleOptimizer:
    return LossScaleOptimizer(sgd(), FixedLossScaleManager(2.0), verbose=False)


def wrapping_handle() -> Any:
    handle = amp.init(device_type="cpu")
    handle.wrap_optimizer(sgd())
    return handle


def block(optimizer: Any, handle: Any = None, step: Any = None) -> None:
    handle = handle or amp.init(device_type="cpu")
    with handle.scale_loss(LOSS, optimizer):
        if step is not None:
            step.step()


def assign_at_o2() -> None:
    model = nn.Linear(2, 2)
    amp.initialize(model, sgd(*model.parameters()), opt_level="O2", verbosity=0)
    model.load_state_dict(model.state_dict(), assign=True)


def clip(max_norm: float, grad: float = 1.0, **options: Any) -> None:
    optimizer, scaler = sgd(param := nn.Parameter(torch.ones(2))), amp.GradScaler("cpu")
    scaler.scale((param * grad).sum()).backward()
    scaler.clip_grad_norm_(optimizer, max_norm, **options)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


class Wrong(rp.Reparameterization):
    def reparameterize(self, name: str, weight: Any, dim: Any) -> Any:
        return [f"{name}_g"], []


class Taken(rp.Reparameterization):
    def reparameterize(self, name: str, weight: Any, dim: Any) -> Any:
        return ["bias"], [nn.Parameter(weight.clone())]


# fmt: off
WRONG: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "find_nonfinite: model is None", lambda: find_nonfinite(None, sgd)),
    (TypeError, "find_nonfinite: run is a int", lambda: find_nonfinite(nn.ReLU(), 3)),
    (TypeError, "Monitor: model is a int", lambda: Monitor(model=3)),
    (ValueError, "Monitor: the handle has given its scale", lambda: Monitor(wrapping_handle())),
    (RuntimeError, "multi_tensor_scale: the overflow flag has 2 elements",
     lambda: amp_C.multi_tensor_scale(1, ONE.int(), [[ONE], [ONE]], 1.0)),
    (RuntimeError, "scale_check_overflow: downscaled_grads is torch.float64",
     lambda: amp_C.scale_check_overflow(ONE, 1.0, FLAG, DOUBLES)),
    (TypeError, "multi_tensor_adam: step is None",
     lambda: amp_C.multi_tensor_adam(1, FLAG, [[ONE]] * 4, 0.1, 0.9, 0.9, 1.0, None, 1, 1, 0.0)),
    (RuntimeError, "apex_C.flatten: tensors is empty", lambda: apex_C.flatten([])),
    (RuntimeError, "apex_C.flatten: tensors are of", lambda: apex_C.flatten([ONE, DOUBLES])),
    (RuntimeError, "apex_C.unflatten: flat has 2", lambda: apex_C.unflatten(ONE, [ONE, ONE])),
    (TypeError, "norm: input is torch.int64", lambda: normalization.FusedLayerNorm(2)(ONE.long())),
    (RuntimeError, "MixedFusedLayerNorm: elementwise_affine is False",
     lambda: normalization.MixedFusedLayerNorm(2, elementwise_affine=False)),
    (ValueError, "fused_layer_norm_cuda.backward: memory_efficient is True",
     lambda: fused_layer_norm_cuda.backward(ONE, ONE, ONE, ONE, [2], 1e-5, True)),
    (TypeError, "FusedAdam: bias_correction is (0.9", lambda: adam(bias_correction=(0.9, 0.99))),
    (ValueError, "FusedAdam: moment_dtype is torch.float16", lambda: adam(moment_dtype=HALF)),
    (ValueError, "FusedAdam: master_weights is 'both'", lambda: adam(master_weights="both")),
    (TypeError, "FusedAdam: there is no option 'master_weight'; did you mean 'master_weights'?",
     lambda: adam(master_weight=True)),
    (TypeError, "FusedAdam: there is no option 'zzz'", lambda: adam(zzz=1)),
    (TypeError, "MasterWeights: optimizer_class is an object, of SGD; it must be a class",
     lambda: MasterWeights([half_param()], sgd())),
    (TypeError, "MasterWeights: a parameter is of torch.float8_e4m3fn",
     lambda: MasterWeights([nn.Parameter(ONE.to(torch.float8_e4m3fn))], torch.optim.SGD)),
    (ValueError, "GradScaler: max_scale is 1.0; it must lie in [4.0",
     lambda: amp.GradScaler("cpu", max_scale=1.0, min_scale=4.0)),
    (TypeError, "Monitor.record: scale is 'x'; it must be a number",
     lambda: Monitor().record(scale="x")),
    (TypeError, "Monitor.record: clip is tensor([1., 1.])", lambda: Monitor().record(clip=ONE)),
    (TypeError, "LARC: optimizer is a int", lambda: LARC(3)),
    (ValueError, "is no JSON file", lambda: History.load(__file__)),
    (ValueError, "is not what Monitor.save writes", lambda: History.load(RESULTS / "sass.json")),
    (RuntimeError, "Found param weight with type torch.float16",
     lambda: amp.initialize(nn.Linear(2, 2).half(), opt_level="O1", verbosity=0)),
    (RuntimeError, "load_state_dict: assign is True", assign_at_o2),
    (RuntimeError, "detach_hidden: there is no hidden state", lambda: lstm().detach_hidden()),
    (ValueError, "RNNCell: input has shape [2]", lambda: lstm().rnns[0](ONE)),
    (TypeError, "collect_hidden is a str", lambda: lstm()(ONE.view(1, 1, 2), collect_hidden="a")),
    (ValueError, "GRU: output_size is 3", lambda: RNN.GRU(2, 2, 1, output_size=3)),
    (ValueError, "FusedAdam: amp_scale_adjustment is 2",
     lambda: contrib.FusedAdam([nn.Parameter(ONE)], amp_scale_adjustment=2)),
    (TypeError, "fp16_compute: module is a int", lambda: amp.fp16_compute(3)),
    (ValueError, "fp16_compute: dtype is torch.int8", lambda: amp.fp16_compute(LINEAR, torch.int8)),
    (TypeError, "GradScaler: model is a int", lambda: amp.GradScaler("cpu", model=3)),
    (ValueError, "GradScaler.clip_grad_norm_: max_norm is -1", lambda: clip(-1.0)),
    (ValueError, "GradScaler.clip_grad_norm_: norm_type is 1", lambda: clip(1.0, norm_type=1)),
    (RuntimeError, "GradScaler.clip_grad_norm_: the norm of the gradients is inf",
     lambda: clip(1.0, error_if_nonfinite=True, grad=math.inf)),
    (TypeError, "GradScaler.unscale_: optimizer is a int", lambda: SCALER.unscale_(3)),
    (RuntimeError, "After calling `handle.wrap_optimizer()`",
     lambda: block(sgd(), wrapping_handle())),
    (ValueError, "No function named Tensor", lambda: amp.register_half_function(torch, "Tensor")),
    (ValueError, "The function named __len__ in module [] cannot be replaced",
     lambda: amp.register_half_function([], "__len__")),
    (ValueError, "loss_scale is DynamicLossScale",
     lambda: LossScaler(loss_scale.DynamicLossScale(), scale_window=3)),
    (RuntimeError, "scale_loss was given an FP16_Optimizer", lambda: block(fp16(sgd()))),
    (TypeError, "scale_loss: optimizer is a int", lambda: block(3)),
    (RuntimeError, "step() was called inside a scale_loss", lambda: block(o := sgd(), step=o)),
    (TypeError, "step_was_skipped: optimizer is a int", lambda: amp.step_was_skipped(3)),
    (TypeError, "load_checkpoint: path is a int", lambda: checkpoint.load_checkpoint(3)),
    (TypeError, "convert.load: model is a int", lambda: convert.load(3, {"a": ONE})),
    (TypeError, "convert.masters: optimizer is a int", lambda: convert.masters(LINEAR, 3)),
    (ValueError, "convert.masters: weight is in torch.float16 and has no master",
     lambda: convert.masters(model := nn.Linear(2, 2).half(), sgd(*model.parameters()))),
    (TypeError, "keep_fp32: module is a int", lambda: apex_mp.keep_fp32(3, "a")),
    (ValueError, "keep_fp32: outputs is torch.int8",
     lambda: apex_mp.keep_fp32(LINEAR, nn.Linear, outputs=torch.int8)),
    (ValueError, "keep_fp32: 0 is lazy",
     lambda: apex_mp.keep_fp32(nn.Sequential(nn.LazyLinear(2)), "0")),
    (ValueError, "some parameters appear in more than one parameter group",
     lambda: fp16(sgd(p := half_param())).add_param_group({"params": [p]})),
    (RuntimeError, "FP16_Optimizer: the inner optimizer has 0 parameter groups",
     lambda: ((o := fp16(sgd(half_param()))).optimizer.param_groups.clear(), o.step())),
    (ValueError, 'FP16_Optimizer: clip is "global", but SGD', lambda: fp16(sgd(), clip="global")),
    (ValueError, "loss_scale.from_dict: kind is 'a'", lambda: loss_scale.from_dict({"kind": "a"})),
    (TypeError, "FixedLossScaleManager.update_loss_scale: finite_grads is 3",
     lambda: FixedLossScaleManager(2.0).update_loss_scale(3)),
    (ValueError, "LossScaleOptimizer.apply_gradients: grads_and_vars has 0 pairs",
     lambda: managed().apply_gradients([])),
    (ValueError, "LossScaleOptimizer: variable 0 (shape [2]) is none of this optimizer",
     lambda: managed().compute_gradients(LOSS, [ONE])),
    (AttributeError, "LossScaleOptimizer: the loss scale was to be set to 2",
     lambda: setattr(managed().loss_scaler, "cur_scale", 2)),
    (ValueError, "0.weight is one parameter with 1.weight",
     lambda: rp.apply_weight_norm(tied(), "0.weight")),
    (ValueError, "weight is computed by WeightNorm already",
     lambda: rp.apply_weight_norm(rp.apply_weight_norm(nn.Linear(2, 2)))),
    (ValueError, "what torch.nn.utils.parametrize computes a weight from",
     lambda: rp.apply_weight_norm(spectral_norm(nn.Linear(2, 2)))),
    (TypeError, "Wrong.reparameterize('weight', ...) returned 1 names",
     lambda: rp.apply_reparameterization(nn.Linear(2, 2), Wrong)),
    (ValueError, "Taken.reparameterize('weight', ...) wants the names ['bias']",
     lambda: rp.apply_reparameterization(nn.Linear(2, 2), Taken)),
    (ValueError, "reparameterization of 'weight' not found",
     lambda: rp.remove_weight_norm(nn.Linear(2, 2), "weight")),
]
# fmt: on


@pytest.mark.parametrize(("error", "message", "call"), WRONG, ids=[each[1] for each in WRONG])
def test_a_wrong_call_is_refused_in_a_sentence(
    error: type[Exception], message: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()

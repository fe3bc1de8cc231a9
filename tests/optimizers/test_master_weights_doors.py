"""What optimizers under MasterWeights offer beside `step`, and what masters cannot give them."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

import apex_mp
from apex_mp.amp import GradScaler
from apex_mp.optimizers import MasterWeights

BF16, F32 = torch.bfloat16, torch.float32


class Sam(torch.optim.Optimizer):
    """Climbs and comes back (Foret et al. 2021), in two calls, as public code has it."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["old"] = param.data.clone()
                param.add_(param.grad / param.grad.norm() * group["rho"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = self.state[param]["old"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


def train_by_sam(dtype: torch.dtype, make: Any, *, by_closure: bool) -> Tensor:
    param = Parameter(torch.linspace(0.5, 2.0, 8).to(BF16).to(dtype))
    optimizer = make([param], base=torch.optim.SGD, lr=2.0**-10)

    def backward() -> None:
        # Of the rounded weight in both, so that gradients are the same.
        (param.to(BF16).float() * 2.0**-1).sum().backward()

    for _ in range(50):
        backward()
        if by_closure:
            optimizer.step(backward)
        else:
            optimizer.first_step(zero_grad=True)
            backward()
            optimizer.second_step(zero_grad=True)
        optimizer.zero_grad()
    return param.detach() if dtype == F32 else optimizer.master(param)


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("by_block", [False, True])
def test_methods_of_the_optimizers_own_run_with_masters(by_block: bool, by_closure: bool) -> None:
    expected = train_by_sam(F32, Sam, by_closure=by_closure)
    if by_block:
        with apex_mp.use_master_weights():
            found = train_by_sam(BF16, Sam, by_closure=by_closure)
    else:

        def with_masters(params: Any, **options: Any) -> Any:
            return MasterWeights(params, Sam, **options)

        found = train_by_sam(BF16, with_masters, by_closure=by_closure)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (found - torch.linspace(0.5, 2.0, 8)).abs().min() > 0.01


class Nested(torch.optim.SGD):
    """Saves another layout than torch's."""

    def state_dict(self) -> Any:
        return {"inner": super().state_dict(), "version": 2}

    def load_state_dict(self, saved: Any) -> None:
        assert {*saved} == {"inner", "version"}
        super().load_state_dict(saved["inner"])


def stepped(optimizer: Any, param: Parameter, count: int = 3) -> Any:
    for _ in range(count):
        param.grad = torch.full_like(param, 0.25)
        optimizer.step()
    return optimizer


def test_another_layout_of_files_is_kept_and_has_masters() -> None:
    options = {"lr": 2.0**-9, "momentum": 0.5}
    param = Parameter(torch.linspace(1.0, 2.0, 4).to(BF16))
    optimizer = stepped(MasterWeights([param], Nested, **options), param)
    saved = copy.deepcopy(optimizer.state_dict())
    other = Parameter(param.detach().clone())
    fresh = MasterWeights([other], Nested, **options)
    fresh.load_state_dict(saved)
    stepped(optimizer, param)
    stepped(fresh, other)
    assert_same_bits(fresh.master(other), optimizer.master(param))
    without = Nested([Parameter(torch.ones(4))], **options)
    fresh.load_state_dict(without.state_dict())
    assert_same_bits(fresh.master(other), other.detach().float())


class Switching(torch.optim.SGD):
    """Has two sets of weights."""

    @torch.no_grad()
    def eval(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.lerp_(self.state[param].setdefault("z", param.clone() + 2.0**-12), 0.5)


IN_A_NEW_PROCESS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_master_weights_doors import Switching
param, optimizer = torch.load(sys.argv[2], weights_only=False)
optimizer.eval()
torch.save(optimizer.master(param), sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.cpu_only
def test_a_pickle_keeps_methods_in_float32_in_another_process(tmp_path: Path) -> None:
    param = Parameter(torch.linspace(1.0, 2.0, 4).to(BF16))
    optimizer = stepped(MasterWeights([param], Switching, lr=2.0**-9), param)
    optimizer.eval()
    torch.save((param, optimizer), tmp_path / "pickle.pt")
    optimizer.eval()
    paths = [Path(__file__).parent, tmp_path / "pickle.pt", tmp_path / "master.pt"]
    subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS, *map(str, paths)],
        check=True,
        cwd=Path(apex_mp.__file__).parents[1],
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=120,
    )
    assert_same_bits(torch.load(tmp_path / "master.pt"), optimizer.master(param))


class Newton(torch.optim.SGD):
    """Differentiates its gradients, as AdaHessian does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (param,) = self.param_groups[0]["params"]
        with torch.enable_grad():
            (second,) = torch.autograd.grad(param.grad, param, torch.ones_like(param))
        param.sub_(param.grad / second)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_an_optimizer_that_differentiates_gradients_is_refused_by_name() -> None:
    param = Parameter(torch.linspace(1, 2, 8, dtype=BF16))
    optimizer = MasterWeights([param], Newton, lr=0.1)
    before = param.detach().clone()
    param.pow(4).sum().float().backward(create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"MasterWeights: Newton.step .* of group 0, parameter 0 has a"
    ):
        optimizer.step()
    assert_same_bits(param.detach(), before)
    assert param.grad is not None
    assert param.grad.dtype == BF16
    param.grad = None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_an_optimizer_that_does_not_may_have_gradients_with_a_graph() -> None:
    param = Parameter(torch.linspace(1, 2, 8, dtype=BF16))
    optimizer = MasterWeights([param], torch.optim.NAdam, lr=0.1)
    param.pow(4).sum().float().backward(create_graph=True)
    optimizer.step()
    assert (optimizer.master(param) < torch.linspace(1, 2, 8)).all()
    param.grad = None


def test_the_graph_through_a_differentiable_step_stays_and_masters_are_left_out() -> None:
    inner = torch.linspace(-1, 1, 8).to(BF16).requires_grad_().clone()
    rate = torch.full((8,), 0.5, dtype=BF16, requires_grad=True)
    inner.grad = rate * 2
    optimizer = MasterWeights([inner], torch.optim.SGD, lr=0.5, differentiable=True)
    with pytest.warns(RuntimeWarning, match="SGD is differentiable, and masters would cut"):
        optimizer.step()
    inner.float().sum().backward()
    assert_same_bits(rate.grad, torch.full_like(rate, -1.0))
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    inner.grad = rate.detach() * 2
    with pytest.raises(RuntimeError, match="differentiable is True, and gradients are scaled"):
        scaler.step(optimizer)

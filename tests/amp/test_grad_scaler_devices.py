"""A GradScaler whose scale, losses and gradients are on several devices: numbers arrive in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from apex_mp.amp import GradScaler
from apex_mp.optimizers import FusedAdam

F16, BF16, F32, C64 = torch.float16, torch.bfloat16, torch.float32, torch.complex64


class EarlyReads(TorchDispatchMode):
    """Lists copies to the CPU that the host does not wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("non_blocking") and torch.device(kwargs.get("device")).type == "cpu":
            self.found.append(func)
        return func(*args, **kwargs)


@pytest.mark.cpu_only
@pytest.mark.parametrize("scaler_type", [GradScaler, torch.amp.GradScaler])
def test_the_scale_of_an_output_on_the_cpu_is_waited_for(scaler_type: Any) -> None:
    scaler = scaler_type("cpu")
    with FakeTensorMode(), EarlyReads() as reads:
        scaler.scale([torch.ones((), device="cuda"), torch.ones((), device="cpu")])
    # If torch's waits too, GradScaler._scaled is not needed.
    assert bool(reads.found) is (scaler_type is not GradScaler)


@pytest.mark.parametrize("output", ["loss", {"loss": 1.0}, 1.0, [torch.ones(()), None]])
def test_an_output_that_is_no_tensor_is_named(output: Any, device: torch.device) -> None:
    kind = type(output[1] if isinstance(output, list) else output).__name__
    with pytest.raises(ValueError, match=f"GradScaler.scale: an output is a {kind}; outputs must"):
        GradScaler(device.type).scale(output)


def grad_of(kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    grad = torch.arange(1.0, 13.0).reshape(4, 3).to(dtype)
    if dtype.is_complex:
        grad = grad * (1 - 2j)
    made = {
        "dense": lambda: grad,
        "with gaps": lambda: torch.cat([grad, grad], 1)[:, :3],
        "sparse": lambda: torch.sparse_coo_tensor([[0, 2, 2, 3]], grad, (5, 3)),
        "conjugate": lambda: grad.conj(),
    }
    return made[kind]().to(device)


@pytest.mark.filterwarnings("ignore:GradScaler. SGD steps 1 parameter of b?float16 that have no")
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for kind in ("dense", "with gaps", "sparse") for dtype in (F16, BF16, F32)),
        *((kind, C64) for kind in ("dense", "with gaps", "sparse", "conjugate")),
    ],
)
def test_gradients_of_any_layout_and_dtype_are_unscaled_and_checked(
    kind: str, dtype: torch.dtype, bad: float | None, device: torch.device
) -> None:
    grad = grad_of(kind, dtype, device)
    param = Parameter(torch.zeros(grad.shape, dtype=dtype, device=device))
    expected = (grad.to_dense() if grad.is_sparse else grad).resolve_conj() / 4.0
    if bad is not None:
        (grad._values() if grad.is_sparse else grad)[1, 1] = bad
    param.grad = grad
    scaler = GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.unscale_(optimizer)
    if bad is None:
        unscaled = param.grad.to_dense() if param.grad.is_sparse else param.grad
        assert torch.equal(unscaled.resolve_conj(), expected)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) is (bad is not None)
    assert bool(param.count_nonzero()) is (bad is None)


@pytest.mark.parametrize("kind", ["dense", "with gaps", "sparse", "conjugate"])
def test_a_gradient_that_parameters_share_is_unscaled_once(kind: str, device: torch.device) -> None:
    grad = grad_of(kind, C64, device)
    params = [Parameter(torch.zeros(grad.shape, dtype=C64, device=device)) for _ in range(2)]
    for param in params:
        param.grad = grad
    expected = grad.to_dense().resolve_conj() / 4.0
    scaler = GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(torch.optim.SGD(params, lr=1.0))
    for param in params:
        assert torch.equal(param.grad.to_dense().resolve_conj(), expected)


def test_conjugate_gradients_are_clipped(device: torch.device) -> None:
    param = Parameter(torch.ones(3, dtype=C64, device=device))
    scaler = GradScaler(device.type, init_scale=8.0)
    scaler.scale((param.conj() * (3 + 4j)).real.sum()).backward()
    assert param.grad.is_conj()
    norm = scaler.clip_grad_norm_(torch.optim.SGD([param], lr=1.0), 1.0)
    assert norm.item() == pytest.approx(75.0**0.5)
    assert torch.linalg.vector_norm(param.grad).item() == pytest.approx(1.0, rel=1e-5)


def test_gradients_made_in_inference_mode_are_unscaled(device: torch.device) -> None:
    with torch.inference_mode():
        grad = torch.full((8,), 8.0, device=device)[::2]
    param = Parameter(torch.zeros(4, device=device))
    param.grad = grad
    scaler = GradScaler(device.type, init_scale=8.0)
    scaler.scale(torch.ones((), device=device))
    scaler.step(torch.optim.SGD([param], lr=1.0))
    assert param.tolist() == [-1.0] * 4


def test_a_complex_parameter_trains_as_without_a_scaler(device: torch.device) -> None:
    def run(scaler: GradScaler | None) -> Tensor:
        torch.manual_seed(0)
        weight = Parameter(torch.randn(4, dtype=C64).to(device))
        factor = Parameter(torch.randn(4).to(device))
        optimizer = torch.optim.Adam([weight, factor], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = ((weight * factor).abs() ** 2).sum()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return weight.detach()

    assert torch.equal(run(GradScaler(device.type)), run(None))


MAKE: dict[str, Any] = {
    "FusedAdam": FusedAdam,
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW": torch.optim.AdamW,
}


@pytest.mark.cuda_only
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
@pytest.mark.parametrize("of_scale", ["cuda", "cpu"])
@pytest.mark.parametrize("of_params", [("cpu",), ("cuda",), ("cuda", "cpu")], ids=" ".join)
def test_a_step_reads_no_number_before_it_is_there(
    make: Any, of_scale: str, of_params: tuple[str, ...]
) -> None:
    params = [Parameter(torch.ones(3, device=each)) for each in of_params]
    optimizer = make(params)
    scaler = GradScaler(of_scale, init_scale=4.0)
    scaler.scale(torch.ones((), device=of_scale))
    for bad in (False, True, False):
        torch.cuda._sleep(50_000_000)  # What the host does not wait for arrives after that.
        for param in params:
            # An operation of the GPU, where its parameters are.
            param.grad = torch.full_like(param, 4.0)
        if bad:
            params[0].grad.mul_(float("inf"))
        before = [param.detach().cpu() for param in params]
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer) is bad
        scaler.update()
        after = [param.detach().cpu() for param in params]
        same = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
        assert same == [bad] * len(params)
    assert scaler.get_scale() == 2.0

"""Sharded checkpoints go on in another number of processes, in one, and in torch's AdamW."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_checkpoint_cases import AFTER, BEFORE, WORLDS, net, work
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from apex_mp.optimizers import FusedAdam

pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs of each number of processes were saved, and then loaded by all others."""
    path = tmp_path_factory.mktemp("checkpoints")
    for what in ("save", "load"):
        for world in WORLDS:
            arguments = (world, str(path), what)
            torch.multiprocessing.spawn(work, args=arguments, nprocs=world)  # type: ignore[no-untyped-call]
    return path


def found(folder: Path, what: str, world: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{what}{world}-{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("name", ["4", "2", "1", "new4", "new1", "async4", "file1"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_run_goes_on_in_any_number_of_processes(folder: Path, world: int, name: str) -> None:
    if world == 1 and name == "file1":
        pytest.skip("that is no sharded run")
    saved_by = int(name[-1])
    expected = found(folder, "save", saved_by)[0]["after"]
    for run in found(folder, "load", world):
        after = run[name]
        assert after["scale"] == expected["scale"]
        assert after["counts"] == expected["counts"] == [BEFORE + AFTER] * 4
        for key in ("weights", "exp_avg", "exp_avg_sq", "masters"):
            if world == saved_by:
                assert torch.equal(after[key], expected[key])
            else:
                # Gradients of parts are rounded to float16 before they are added; measured: 0.0006.
                assert (after[key] - expected[key]).norm() < 0.003 * expected[key].norm()


def test_a_consolidated_file_goes_on_without_us(folder: Path) -> None:
    dcp_to_torch_save(folder / "4", folder / "whole.pt")
    saved = torch.load(folder / "whole.pt", weights_only=False)["run"]
    masters = {name: state["master_param"] for name, state in saved["optimizer"]["state"].items()}
    grads = [torch.randn(param.shape) for param in net().parameters()]

    def stepped(make: Any, dtype: torch.dtype, weights: dict[str, Tensor]) -> list[Any]:
        model = net().to(dtype)
        model.load_state_dict(weights)
        optimizer = make(model.parameters())
        # It writes to what it is given.
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved["optimizer"]))
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad.to(dtype)
        optimizer.step()
        if dtype == torch.float16:
            return [optimizer.master(param) for param in model.parameters()]
        return [*model.parameters()]

    half, single = torch.float16, torch.float32
    grads = [grad.half() for grad in grads]
    ours = stepped(lambda params: FusedAdam(params, master_weights=True), half, saved["model"])
    theirs = stepped(lambda params: torch.optim.AdamW(params, eps=1e-3), single, masters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)

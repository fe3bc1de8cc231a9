"""Checkpoints and copies of MasterWeights, and others that read its masters."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from master_weights_cases import BF16, both_kinds, give_grads, in_float32, masters_of, new_params
from tolerances import assert_same_bits
from torch import nn

from apex_mp import AveragedMasters, convert
from apex_mp.optimizers import FusedAdam, MasterWeights


@both_kinds
def test_checkpoints_and_copies_go_on_to_the_bit(kind: Any, device: torch.device) -> None:
    params = new_params(None, BF16, device)
    twins = in_float32(params)
    optimizer = MasterWeights(params, torch.optim.AdamW, lr=0.1, master_weights=kind)
    for step in range(3):
        give_grads(params, twins, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [param.detach() for param in params]), file)
    file.seek(0)
    saved, weights = torch.load(file)
    assert saved["state"][0]["master_param"].dtype == torch.float32
    loaded = [nn.Parameter(weight) for weight in weights]
    of_loaded = MasterWeights(loaded, torch.optim.AdamW, lr=0.7, master_weights=kind)
    of_loaded.load_state_dict(saved)
    fused = [nn.Parameter(param.detach().clone()) for param in params]
    of_fused = FusedAdam(fused, lr=0.1, weight_decay=0.01, master_weights=True)
    of_fused.load_state_dict(copy.deepcopy(saved))
    copied, of_copied = copy.deepcopy((params, optimizer))
    pickled, of_pickled = pickle.loads(pickle.dumps((params, optimizer)))
    for step in range(3, 6):
        give_grads(params, twins, step)
        optimizer.step()
        others = ((loaded, of_loaded), (copied, of_copied), (pickled, of_pickled))
        for others_params, other in others:
            assert type(other) is type(optimizer)
            give_grads(others_params, twins, step)
            other.step()
            for param, expected in zip(others_params, params, strict=True):
                assert_same_bits(param.detach(), expected.detach())
        give_grads(fused, twins, step)
        of_fused.step()
    masters = masters_of(optimizer)
    for param, expected in zip(fused, params, strict=True):
        torch.testing.assert_close(of_fused.master(param), masters[expected])


def test_the_checkpoint_of_the_optimizer_alone_is_loaded_both_ways(device: torch.device) -> None:
    params = new_params(None, BF16, device)
    twins = in_float32(params)
    alone = torch.optim.AdamW(twins, lr=0.1)
    optimizer = MasterWeights(params, torch.optim.AdamW, lr=0.1)
    for step in range(2):
        give_grads(params, twins, step)
        alone.step()
    optimizer.load_state_dict(alone.state_dict())
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(optimizer.state[param]["exp_avg"], alone.state[twin]["exp_avg"])
    optimizer.step()
    alone.load_state_dict(optimizer.state_dict())
    assert alone.state[twins[0]]["step"] == 3.0


def test_masters_are_read_by_name_in_averages_and_in_float32_checkpoints(
    device: torch.device,
) -> None:
    model = nn.Linear(4, 2).to(device, BF16)
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=1e-3)
    averaged = AveragedMasters(model, optimizer, avg_fn=lambda _, new, __: new)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    averaged.update_parameters(model)
    saved = convert.masters(model, optimizer)
    for name, param in model.named_parameters():
        master = optimizer.master(param)
        assert (master != param).any()
        assert_same_bits(saved[name], master)
        assert_same_bits(averaged.module.get_parameter(name).detach(), master)
    with pytest.raises(ValueError, match="is no parameter of this optimizer"):
        optimizer.master(torch.ones(2))


def test_torch_loads_a_state_in_which_a_parameter_was_not_stepped(device: torch.device) -> None:
    params = new_params(None, BF16, device)
    optimizer = MasterWeights(params, torch.optim.AdamW, lr=0.1)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    alone = torch.optim.AdamW(params, lr=0.1)
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param in params:
        param.grad = torch.ones_like(param)
    alone.step()
    assert alone.state[params[1]]["step"] == 1.0

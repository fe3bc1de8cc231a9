"""Checkpoints and copies of MasterWeights, and others that read its masters."""

from __future__ import annotations

import copy

import pytest
import torch
from master_weights_cases import BF16, give_grads, in_float32, new_params
from tolerances import assert_same_bits
from torch import nn

from apex_mp import AveragedMasters, convert
from apex_mp.optimizers import MasterWeights


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

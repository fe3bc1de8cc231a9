import importlib
import inspect

import torch
from apex.optimizers import FP16_Optimizer
from torch import nn

fused_adam_cuda = importlib.import_module("fused_adam_cuda")


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def step(self, closure=None, grads=None, output_params=None, scale=1.0):
        grads_group = grads if isinstance(grads[0], list) else [grads]
        output_group = output_params if isinstance(output_params[0], list) else [output_params]
        for group, these, outputs in zip(self.param_groups, grads_group, output_group):
            for p, grad, output in zip(group["params"], these, outputs):
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                state["step"] += 1
                out_p = torch.tensor([], dtype=torch.float) if output is None else output.data
                beta1, beta2 = group["betas"]
                fused_adam_cuda.adam(
                    p.data,
                    out_p,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    grad.data,
                    group["lr"],
                    beta1,
                    beta2,
                    group["eps"],
                    scale,
                    state["step"],
                    1,
                    1,
                    group["weight_decay"],
                )


model = nn.Linear(4, 2).cuda().half()
optimizer = FP16_Optimizer(FusedAdam(model.parameters(), lr=0.05), static_loss_scale=64.0)
assert optimizer.__class__.__name__ == "FP16_Optimizer"
takes_update = "update_master_grads" in inspect.getfullargspec(optimizer.backward).args
inputs = torch.randn(16, 4).cuda().half()
labels = (inputs[:, 0] > 0).long()
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs).float(), labels)
    if takes_update:
        optimizer.backward(loss, update_master_grads=False)
    else:
        optimizer.backward(loss)
    if hasattr(optimizer, "update_master_grads"):
        optimizer.update_master_grads()
    if hasattr(optimizer, "clip_master_grads"):
        optimizer.clip_master_grads(5.0)
    optimizer.step()
    losses.append(loss.item())

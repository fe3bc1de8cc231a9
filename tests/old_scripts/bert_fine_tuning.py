import torch
from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
from apex.optimizers import FP16_Optimizer, FusedAdam
from torch import nn

device = torch.device("cuda", 0)
model = nn.Sequential(nn.Linear(4, 8), BertLayerNorm(8, eps=1e-12), nn.Tanh(), nn.Linear(8, 2))
model.half()
model.to(device)
groups = [
    {"params": [p for n, p in model.named_parameters() if "bias" not in n], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0},
]
optimizer = FusedAdam(groups, lr=0.05, bias_correction=False, max_grad_norm=1.0)
optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)
inputs = torch.randn(16, 4).half().to(device)
labels = (inputs[:, 0] > 0).long()
losses = []
for global_step in range(20):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.backward(loss)
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.05 * (1 - global_step / 40)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

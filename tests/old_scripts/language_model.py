import torch
from apex.fp16_utils import FP16_Optimizer
from torch import nn

model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)).cuda().half()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=0.01)
optimizer = FP16_Optimizer(
    optimizer,
    static_loss_scale=1.0,
    dynamic_loss_scale=True,
    dynamic_loss_args={"init_scale": 2**16},
)
words = torch.arange(8).cuda()
losses = []
for _ in range(40):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(words), (words + 1) % 8)
    optimizer.backward(loss)
    norm = optimizer.clip_master_grads(0.25)
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())

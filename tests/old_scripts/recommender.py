import torch
from apex.optimizers import FusedAdam
from torch import nn

model = nn.Linear(4, 2).cuda().half()
masters = [p.clone().detach().float() for p in model.parameters()]
for master in masters:
    master.requires_grad = True
optimizer = FusedAdam(masters, lr=0.05, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False)
inputs = torch.randn(16, 4, device="cuda").half()
labels = (inputs[:, 0] > 0).long()
losses = []
for _ in range(20):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    model.zero_grad()
    (loss.float() * 512).backward()
    grads = [p.grad for p in model.parameters()]
    optimizer.step(grads=grads, output_params=model.parameters(), scale=512)
    losses.append(loss.item())

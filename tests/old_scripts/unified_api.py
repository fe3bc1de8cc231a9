import torch
from apex import amp
from torch import nn

amp.register_half_function(torch, "einsum")
model = nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
inputs = torch.randn(16, 4).cuda()
labels = (inputs[:, 0] > 0).long()
losses = []
for _ in range(15):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    with amp.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    losses.append(loss.item())
checkpoint = {"amp": amp.state_dict(), "model": model.state_dict()}

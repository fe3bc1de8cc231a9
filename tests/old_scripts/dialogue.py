import apex.fp16_utils
import apex.optimizers.fused_adam as fused_adam
import torch
from torch import nn

model = nn.Linear(4, 2).half().cuda()
optimizer = fused_adam.FusedAdam(model.parameters(), lr=0.05)
optimizer = apex.fp16_utils.FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False)
inputs = torch.cuda.FloatTensor(16, 4).normal_().half()
labels = (inputs[:, 0] > 0).long()
losses, norms = [], []
for _ in range(40):
    optimizer.zero_grad()
    total = 0.0
    for half in (slice(0, 8), slice(8, 16)):
        loss = nn.functional.cross_entropy(model(inputs[half]), labels[half]) / 2
        optimizer.backward(loss, update_master_grads=False)
        total += loss.item()
    optimizer.update_master_grads()
    norms.append(optimizer.clip_master_grads(1.0))
    optimizer.step()
    losses.append(total)
state = optimizer.state_dict()
kept = (state["loss_scaler"], state["optimizer_state_dict"], optimizer.loss_scale)

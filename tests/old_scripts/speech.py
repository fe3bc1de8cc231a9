import torch
from apex import amp
from apex.fp16_utils import FP16_Optimizer, network_to_half
from apex.parallel.LARC import LARC
from torch import nn

# A function in C, as _C.nms is.
clip = amp.float_function(torch._C._VariableFunctions.clamp)
amp_handle = amp.init(enabled=False, verbose=False)
model = nn.Sequential(
    nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
)
model = network_to_half(model.cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
optimizer = FP16_Optimizer(LARC(optimizer, trust_coefficient=0.1), static_loss_scale=128)
inputs = torch.randn(16, 3, 8).cuda()
labels = (inputs.mean((1, 2)) > 0).long()
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(clip(model(inputs).float(), -30, 30), labels)
    optimizer.backward(loss, update_master_grads=False)
    optimizer.update_master_grads()
    norm = optimizer.clip_master_grads(400)
    optimizer.step()
    losses.append(loss.item())

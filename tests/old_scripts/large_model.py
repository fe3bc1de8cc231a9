import amp_C
import apex_C
import torch
from apex.multi_tensor_apply import multi_tensor_applier
from torch import nn

assert multi_tensor_applier.available
model = nn.Linear(4, 2).cuda().half()
masters = [p.detach().clone().float() for p in model.parameters()]
moments = [[torch.zeros_like(p) for p in masters] for _ in range(2)]
overflow_buf = torch.cuda.IntTensor([0])
inputs = torch.randn(16, 4).cuda().half()
labels = (inputs[:, 0] > 0).long()
losses = []
for step in range(1, 21):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    model.zero_grad()
    (loss.float() * 256).backward()
    grads = [p.grad.data for p in model.parameters()]
    wide = [torch.empty_like(p) for p in masters]
    overflow_buf.zero_()
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow_buf, [grads, wide], 1.0 / 256)
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow_buf, [wide], False)
    assert overflow_buf.item() == 0
    flat = apex_C.flatten(wide)
    assert abs(flat.norm().item() - norm.item()) < 1e-4
    wide = apex_C.unflatten(flat, wide)
    multi_tensor_applier(
        amp_C.multi_tensor_adam,
        overflow_buf,
        [wide, masters, *moments],
        0.05,
        0.9,
        0.999,
        1e-8,
        step,
        1,
        1,
        0.0,
    )
    models = list(model.parameters())
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow_buf, [masters, models], 1.0)
    losses.append(loss.item())

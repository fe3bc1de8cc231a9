import torch
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from torch import nn

torch.distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)  # noqa: F821
amp_handle = amp.init()
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
model = DDP(model.cuda())
criterion = nn.CrossEntropyLoss().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
inputs = torch.randn(16, 1, 4, 4).cuda(non_blocking=True)
labels = (inputs.mean((1, 2, 3)) > 0).long()
losses = []
for _ in range(15):
    loss = criterion(model(inputs), labels)
    optimizer.zero_grad()
    with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
    losses.append(loss.item())
torch.distributed.destroy_process_group()

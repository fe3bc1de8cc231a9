"""One process for each GPU, 2019, started by a launcher. Given: args, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex.fp16_utils import FP16_Optimizer
from apex.parallel import DistributedDataParallel as DDP

torch.cuda.set_device(args.local_rank)
torch.distributed.init_process_group(backend="nccl", init_method="env://")

model = DDP(model.cuda().half())
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)

scales = []
for epoch in range(args.epochs):
    for step, (input_ids, label_ids) in enumerate(train_dataloader):
        loss = model(input_ids.cuda(), label_ids.cuda())
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        scales.append(optimizer.loss_scale)
        if args.local_rank == 0:
            print(f"epoch {epoch} step {step} loss {loss.item()} scale {optimizer.loss_scale}")

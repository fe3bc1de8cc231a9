"""Several batches a step, 2018. Given: args, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex.fp16_utils import FP16_Optimizer

model = model.cuda().half()
optimizer = FP16_Optimizer(
    torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
    dynamic_loss_scale=True,
    dynamic_loss_args={"init_scale": 2**14},
)

for _ in range(args.epochs):
    for step, (input_ids, label_ids) in enumerate(train_dataloader):
        loss = model(input_ids.cuda(), label_ids.cuda()) / args.update_freq
        optimizer.backward(loss, update_master_grads=False)
        if (step + 1) % args.update_freq != 0:
            continue
        optimizer.update_master_grads()
        optimizer.clip_master_grads(args.clip)
        optimizer.step()
        optimizer.zero_grad()

"""Any optimizer inside FP16_Optimizer, 2018. Given: args, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex.fp16_utils import FP16_Optimizer

model = model.cuda().half()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
if args.dynamic_loss_scale:
    optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
else:
    optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)

skipped = 0
for epoch in range(args.epochs):
    for step, (input_ids, label_ids) in enumerate(train_dataloader):
        loss = model(input_ids.cuda(), label_ids.cuda())
        optimizer.zero_grad()
        optimizer.backward(loss)  # was: loss.backward()
        optimizer.step()
        if optimizer.overflow:
            skipped += 1
        print(f"epoch {epoch} step {step} loss {loss.item()} scale {optimizer.loss_scale}")

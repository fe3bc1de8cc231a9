"""Saving and resuming, 2018. Given: args, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex.fp16_utils import FP16_Optimizer

model = model.cuda().half()
optimizer = FP16_Optimizer(
    torch.optim.SGD(model.parameters(), args.lr, momentum=0.9),
    dynamic_loss_scale=True,
    dynamic_loss_args={"scale_window": 15},
)

start_epoch = 0
if args.resume:
    checkpoint = torch.load(args.resume)
    start_epoch = checkpoint["epoch"]
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])

for epoch in range(start_epoch, args.epochs):
    for input_ids, label_ids in train_dataloader:
        loss = model(input_ids.cuda(), label_ids.cuda())
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()

    checkpoint = {
        "epoch": epoch + 1,
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(checkpoint, args.checkpoint)

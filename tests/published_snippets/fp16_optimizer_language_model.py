"""A language model with clipping and a schedule, 2018. Given: args, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex.fp16_utils import FP16_Optimizer

model.cuda()
model.half()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
# The scheduler knows the optimizer from before it is wrapped.
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
optimizer = FP16_Optimizer(
    optimizer,
    static_loss_scale=args.static_loss_scale,
    dynamic_loss_scale=args.dynamic_loss_scale,
    dynamic_loss_args={"init_scale": 2**16},
    verbose=False,
)

grad_norms = []
for _ in range(args.epochs):
    for input_ids, label_ids in train_dataloader:
        model.zero_grad()
        loss = model(input_ids.cuda(), label_ids.cuda())
        optimizer.backward(loss)
        grad_norms.append(optimizer.clip_master_grads(args.clip))
        optimizer.step()
        scheduler.step()

"""A step with a closure, 2018. Given: args, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex.fp16_utils import FP16_Optimizer

model = model.cuda().half()
if args.lbfgs:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=args.lr, max_iter=3)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)

for _ in range(args.epochs):
    for input_ids, label_ids in train_dataloader:
        input_ids, label_ids = input_ids.cuda(), label_ids.cuda()

        def closure(input_ids=input_ids, label_ids=label_ids):
            optimizer.zero_grad()
            loss = model(input_ids, label_ids)
            optimizer.backward(loss)
            return loss

        loss = optimizer.step(closure)

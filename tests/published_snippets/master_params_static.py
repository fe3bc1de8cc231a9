"""Master parameters by hand, images, 2018. Given: args, model, criterion, train_loader."""
# ruff: noqa: F821

import torch
from apex.fp16_utils import (
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
)

model = network_to_half(model.cuda())
model_params, master_params = prep_param_lists(model)
optimizer = torch.optim.SGD(
    master_params, args.lr, momentum=args.momentum, weight_decay=args.weight_decay
)

model.train()
for _ in range(args.epochs):
    for images, target in train_loader:
        loss = criterion(model(images.cuda()), target.cuda())
        loss = loss * args.static_loss_scale
        model.zero_grad()
        loss.backward()
        model_grads_to_master_grads(model_params, master_params)
        if args.static_loss_scale != 1:
            for param in master_params:
                param.grad.data = param.grad.data / args.static_loss_scale
        optimizer.step()
        master_params_to_model_params(model_params, master_params)

"""Master parameters and a loss scaler by hand, text, 2018. Given: args, model, train_dataloader."""
# ruff: noqa: F403, F405

import torch
from apex.fp16_utils import *

model = network_to_half(model.cuda())
model_params, master_params = prep_param_lists(model)
optimizer = torch.optim.SGD(master_params, lr=args.lr)
if args.dynamic_loss_scale:
    loss_scaler = DynamicLossScaler(init_scale=args.init_scale, scale_window=args.scale_window)
else:
    loss_scaler = LossScaler(args.static_loss_scale)

skipped = 0
for _ in range(args.epochs):
    for input_ids, label_ids in train_dataloader:
        model.zero_grad()
        output = model(input_ids.cuda())
        loss = torch.nn.functional.cross_entropy(output.float(), label_ids.cuda())
        loss_scaler.backward(loss)

        overflow = loss_scaler.has_overflow(model_params)
        loss_scale = loss_scaler.loss_scale
        loss_scaler.update_scale(overflow)
        if overflow:
            skipped += 1
            continue

        model_grads_to_master_grads(model_params, master_params)
        for param in master_params:
            param.grad.data.mul_(1.0 / loss_scale)
        clip_grad_norm(master_params, args.clip)
        optimizer.step()
        master_params_to_model_params(model_params, master_params)
        print(f"loss {to_python_float(loss.data)}")

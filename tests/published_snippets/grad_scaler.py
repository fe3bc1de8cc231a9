"""FusedAdam in a loop of torch.amp. Given: args, device, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex.optimizers import FusedAdam

model.cuda()
optimizer = FusedAdam(model.parameters(), lr=args.lr, weight_decay=0.01)
scaler = torch.amp.GradScaler(device)

for _ in range(args.epochs):
    for input_ids, label_ids in train_dataloader:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = model(input_ids.cuda(), label_ids.cuda())
        scaler.scale(loss).backward()
        if args.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()

"""Casts and a scaled loss, 2018. Given: args, model, criterion, train_loader."""
# ruff: noqa: F821

import torch
from apex import amp

amp_handle = amp.init(enabled=args.fp16)

model.cuda()
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

model.train()
for _ in range(args.epochs):
    for images, target in train_loader:
        output = model(images.cuda())
        loss = criterion(output, target.cuda())

        optimizer.zero_grad()
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

"""Functions of one's own, by decorator, 2018. Given: args, model, train_dataloader."""
# ruff: noqa: F821

import torch
from apex import amp


class Sharpen(torch.autograd.Function):
    @staticmethod
    @amp.half_function
    def forward(ctx, logits, factor):
        ctx.save_for_backward(factor)
        return logits * factor

    @staticmethod
    @amp.float_function
    def backward(ctx, grad_output):
        (factor,) = ctx.saved_tensors
        return grad_output * factor, None


@amp.float_function
def hinge_loss(logits, target):
    margin = (logits[:, 1] - logits[:, 0]) * (2 * target - 1)
    return (1 - margin).clamp(min=0).mean()


amp_handle = amp.init()

model.cuda()
factor = torch.full((2,), args.factor, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

for _ in range(args.epochs):
    for input_ids, label_ids in train_dataloader:
        logits = Sharpen.apply(model(input_ids.cuda()), factor)
        loss = hinge_loss(logits, label_ids.cuda())
        optimizer.zero_grad()
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

import torch
from apex import amp
from apex.parallel import convert_syncbn_model
from apex.parallel.LARC import LARC
from torch import nn


@amp.float_function
def nms(boxes):
    assert boxes.dtype == torch.float32
    return boxes


class Square(torch.autograd.Function):
    @staticmethod
    @amp.half_function
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


amp_handle = amp.init(enabled=True, verbose=False)
model = convert_syncbn_model(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
model = model.cuda()
inner = LARC(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), trust_coefficient=0.1)
optimizer = amp_handle.wrap_optimizer(inner, num_loss=2)
assert optimizer._optimizer is inner
inputs = torch.randn(16, 4).cuda()
labels = (inputs[:, 0] > 0).long()
losses = []
for _ in range(20):
    optimizer.zero_grad()
    scores = model(inputs)
    classes = nn.functional.cross_entropy(nms(scores), labels)
    boxes = Square.apply(scores).mean() * 0.01
    for loss in (classes, boxes):
        with optimizer.scale_loss(loss) as scaled_loss:
            scaled_loss.backward(retain_graph=loss is classes)
    optimizer.step()
    losses.append(classes.item())

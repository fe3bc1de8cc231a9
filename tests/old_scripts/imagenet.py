import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data.distributed
from apex.fp16_utils import *  # noqa: F403
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model
from torch._six import string_classes

parser = argparse.ArgumentParser()
parser.add_argument("data", metavar="DIR")
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("--resume", default="")
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--static-loss-scale", type=float, default=1)
parser.add_argument("--dynamic-loss-scale", action="store_true")
parser.add_argument("--sync_bn", action="store_true")
parser.add_argument("--prof", action="store_true")
parser.add_argument("--local_rank", default=0, type=int)


class Images(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.images = np.load(os.path.join(folder, "images.npy"))
        self.labels = np.load(os.path.join(folder, "labels.npy")).astype(np.int)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Prefetcher(object):
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True).float()
            self.next_target = self.next_target.cuda(non_blocking=True)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, getattr(self, "next_target", None)
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
            self.preload()
        return input, target


def accuracy(output, target, topk=(1,)):
    _, pred = output.topk(max(topk), 1, True, True)
    correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
    return [correct[:k].view(-1).float().sum(0).mul_(100.0 / target.size(0)) for k in topk]


def reduce_tensor(tensor):
    reduced = tensor.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    reduced /= args.world_size
    return reduced


args = parser.parse_args()
assert isinstance(args.data, string_classes)
assert torch.backends.cudnn.enabled, "fp16 mode requires cudnn backend to be enabled."
torch.backends.cudnn.benchmark = True
args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
args.world_size = 1
torch.manual_seed(args.local_rank)
if args.distributed:
    torch.cuda.set_device(args.local_rank % torch.cuda.device_count())
    dist.init_process_group(backend="nccl", init_method="env://")
    args.world_size = dist.get_world_size()

model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6)
)
if args.sync_bn:
    model = convert_syncbn_model(model)
model = model.cuda()
if args.fp16:
    model = network_to_half(model)  # noqa: F405
if args.distributed:
    model = DDP(model, delay_allreduce=True)
criterion = nn.CrossEntropyLoss().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=1e-4)
if args.fp16:
    optimizer = FP16_Optimizer(  # noqa: F405
        optimizer,
        static_loss_scale=args.static_loss_scale,
        dynamic_loss_scale=args.dynamic_loss_scale,
        verbose=False,
    )
start_epoch = 0
if args.resume:
    checkpoint = torch.load(
        args.resume, map_location=lambda storage, loc: storage.cuda(args.local_rank)
    )
    start_epoch = checkpoint["epoch"]
    assert checkpoint["args"].fp16 == args.fp16
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])

dataset = Images(args.data)
sampler = torch.utils.data.distributed.DistributedSampler(dataset) if args.distributed else None
loader = torch.utils.data.DataLoader(
    dataset, batch_size=8, shuffle=sampler is None, num_workers=0, pin_memory=True, sampler=sampler
)
for epoch in range(start_epoch, args.epochs):
    if args.distributed:
        sampler.set_epoch(epoch)
    for group in optimizer.param_groups:
        group["lr"] = 0.2 * (0.1 ** (epoch // 30))
    model.train()
    prefetcher = Prefetcher(loader)
    input, target = prefetcher.next()
    total, count = 0.0, 0
    while input is not None:
        if args.prof:
            torch.cuda.profiler.cudart().cudaProfilerStart()
            torch.cuda.nvtx.range_push("forward")
        output = model(input)
        if args.prof:
            torch.cuda.nvtx.range_pop()
        loss = criterion(output, target)
        prec1, prec5 = accuracy(output.data.float(), target, topk=(1, 5))
        reduced = reduce_tensor(loss.data) if args.distributed else loss.data
        optimizer.zero_grad()
        if args.fp16:
            optimizer.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        total, count = total + reduced.item(), count + 1
        input, target = prefetcher.next()
    if args.local_rank == 0:
        print("epoch %d loss %.3f" % (epoch, total / count), flush=True)
        state = {"epoch": epoch + 1, "args": args, "state_dict": model.state_dict()}
        state["optimizer"] = optimizer.state_dict()
        torch.save(state, os.path.join(args.data, "checkpoint.pth.tar"))
weights = [p.detach().cpu().double().sum().item() for p in model.parameters()]
np.save(os.path.join(args.data, "weights%d.npy" % args.local_rank), np.array(weights))
if args.distributed:
    dist.barrier()
    os._exit(0)  # Not of 2019: an exit with gloo's threads about aborts now and then.

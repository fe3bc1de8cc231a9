"""Train a ResNet on images with network_to_half and FP16_Optimizer.

    main_fp16_optimizer.py --fp16                   the handwritten digits, a loss scale of 1
    main_fp16_optimizer.py --fp16 --static-loss-scale 128.0 DIR
    main_fp16_optimizer.py --fp16 --dynamic-loss-scale DIR
    main_fp16_optimizer.py DIR                      float32
    python -m torch.distributed.launch --nproc_per_node=2 main_fp16_optimizer.py --fp16 DIR

A scale flag implies --fp16; the first line of the log says which API runs. The last lines are a
table of all epochs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import common
import flags
import torch.nn.functional as F  # noqa: N812
import training
from torch import Tensor

from apex_mp.fp16_utils import FP16_Optimizer, network_to_half
from apex_mp.optimizers import FusedSGD
from apex_mp.parallel import DistributedDataParallel, convert_syncbn_model


def is_asked_for(args: argparse.Namespace) -> bool:
    return args.fp16 or args.static_loss_scale is not None or args.dynamic_loss_scale


def check(args: argparse.Namespace) -> None:
    """Refuse flags of amp.initialize.

    Raises:
        SystemExit: There is one.
    """
    for name in ("opt_level", "keep_batchnorm_fp32", "loss_scale"):
        if getattr(args, name) is not None:
            sys.exit(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it is for amp.initialize, "
                "which main_amp.py runs without --fp16, --static-loss-scale and "
                "--dynamic-loss-scale; FP16_Optimizer takes these three"
            )


def train(args: argparse.Namespace) -> list[dict[str, float]]:
    check(args)
    api, scale = "float32", 1.0 if args.static_loss_scale is None else args.static_loss_scale
    if is_asked_for(args):
        kind = "dynamic loss scale" if args.dynamic_loss_scale else f"static loss scale {scale}"
        api = f"FP16_Optimizer, {kind}"
    with training.session(args, api) as (images, val):
        return fit(args, api, images, val, scale)


def fit(
    args: argparse.Namespace, api: str, images: common.Folder, val: common.Folder, scale: float
) -> list[dict[str, float]]:
    """Train in this process, which has joined the others."""
    module = common.make_model(args.arch, len(images.classes)).to(args.device)
    if args.sync_bn:
        module = convert_syncbn_model(module)
    if is_asked_for(args):
        module = network_to_half(module)
    model = DistributedDataParallel(module) if args.world > 1 else module
    optimizer: Any = FusedSGD(
        module.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    if is_asked_for(args):
        optimizer = FP16_Optimizer(
            optimizer,
            static_loss_scale=scale,
            dynamic_loss_scale=args.dynamic_loss_scale,
            model=module,
        )

    def step(batch: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = model(batch).float()
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        if is_asked_for(args):
            optimizer.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        return output, loss

    way = training.Training(
        api, module, optimizer, step, lambda: getattr(optimizer, "loss_scale", 1.0)
    )
    return training.fit(args, way, images, val)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    return train(flags.parse_args(__doc__, argv))


if __name__ == "__main__":
    main()

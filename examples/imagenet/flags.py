"""The flags of main_amp.py and main_fp16_optimizer.py."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import common
import torch

# Defaults: what a CPU does in a minute, and what is usual on GPUs.
ON = {
    "cpu": {"arch": "resnet8", "epochs": 8, "batch_size": 16, "workers": 0},
    "cuda": {"arch": "resnet18", "epochs": 90, "batch_size": 256, "workers": 4},
}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be a whole number, at least 1")
    return int(text)


def scale(text: str) -> str:
    if text != "dynamic":
        try:
            float(text)
        except ValueError:
            sentence = f"{text!r}; it must be a number or dynamic"
            raise argparse.ArgumentTypeError(sentence) from None
    return text


def new_parser(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", nargs="?", type=Path, metavar="DIR", help=f"{common.LAYOUT} [digits]")
    add("-a", "--arch", help="resnet8, or a model of torchvision [cpu: resnet8, cuda: resnet18]")
    add("--epochs", type=positive, help="in all, those before --resume too [cpu: 8, cuda: 90]")
    add("-b", "--batch-size", type=positive, help="of each process [cpu: 16, cuda: 256]")
    add("-j", "--workers", type=int, help="processes that load images [cpu: 0, cuda: 4]")
    lr = "for 256 images a step, else scaled; rises for 5 epochs, falls after 30, 60 and 80 [0.1]"
    add("--lr", type=float, default=0.1, help=lr)
    add("--momentum", type=float, default=0.9, help="of FusedSGD [0.9]")
    add("--weight-decay", "--wd", type=float, default=1e-4, help="of FusedSGD [1e-4]")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint, to the same bits")
    add("--evaluate", action="store_true", help="validate what --resume names; do not train")
    add("--prof", type=positive, metavar="N", help="profile N iterations of an epoch, and stop")
    add("--deterministic", action="store_true", help="the same bits in each run on a GPU, too")
    add("--sync-bn", action="store_true", help="batch norms over the batches of all processes")
    levels = ("O0", "O1", "O2", "O3")
    add("--opt-level", choices=levels, help="of amp.initialize [O1]")
    add("--keep-batchnorm-fp32", metavar="BOOL", help="of amp.initialize [O2: True, O3: False]")
    add("--loss-scale", type=scale, metavar="S", help='of amp.initialize: a number or "dynamic"')
    add("--fp16", action="store_true", help="use FP16_Optimizer; the loss scale is 1")
    add("--static-loss-scale", type=float, metavar="S", help="use FP16_Optimizer with this scale")
    add("--dynamic-loss-scale", action="store_true", help="use FP16_Optimizer, scale adjusted")
    rank = int(os.environ.get("LOCAL_RANK", 0))
    add("--local-rank", type=int, default=rank, help="which GPU; given by launchers")
    add("--device", choices=ON, help="[cuda if there is a GPU]")
    add("--seed", type=int, default=0, help="of weights, order and crops [0]")
    add("--size", type=positive, help="of images in the model [224, or the first's if smaller]")
    add("--min-area", type=float, help="least part of an image in a crop [0.08, digits: 0.7]")
    add("--flip", type=float, help="probability of a mirror image [0.5, digits: 0]")
    files = "checkpoint.pth.tar and model_best.pth.tar"
    add("--save", type=Path, default=Path(), metavar="FOLDER", help=f"gets {files} [.]")
    return parser


def parse_args(doc: str, argv: list[str] | None = None) -> argparse.Namespace:
    """Read the flags; each may be written with hyphens or with underscores."""
    parser = new_parser(doc)
    args = parser.parse_args([*map(hyphened, sys.argv[1:] if argv is None else argv)])
    if args.evaluate and not args.resume:
        parser.error("--evaluate validates a checkpoint; give --resume FILE, too")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    defaults = {**ON[args.device], **common.CROPS["folder" if args.data else "digits"]}
    if find_spec("torchvision") is None:
        defaults["arch"] = "resnet8"
    for name, value in defaults.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    args.world, args.rank = (int(os.environ.get(n, d)) for n, d in (("WORLD_SIZE", 1), ("RANK", 0)))
    return args


def hyphened(argument: str) -> str:
    """Write the name of a flag with hyphens."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument

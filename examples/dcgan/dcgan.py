"""Train a DCGAN in mixed precision: two networks, two optimizers, three losses.

    python examples/dcgan/dcgan.py                              draws digits; amp.initialize, O1
    python examples/dcgan/dcgan.py --opt_level O2               or O0 (float32), O3
    python examples/dcgan/dcgan.py --handle                     amp.init() and wrap_optimizer
    python examples/dcgan/dcgan.py --dataroot FOLDER --imageSize 64 --ngf 64 --ndf 64 --nz 100
    python examples/dcgan/dcgan.py --resume examples/output/dcgan/checkpoint.pt --niter 50

The default data are the handwritten digits of scikit-learn, 1,797 images of 8 x 8, enlarged. The
discriminator has two losses, of real images and of generated ones, the generator has one. Each has
a loss scale of its own, and an overflow skips the step of the optimizer that it is of. A checkpoint
is written to --outf after each epoch; --resume goes on from it to the same bits.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader

import apex_mp
from apex_mp import amp
from apex_mp.optimizers import FusedAdam

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for arguments.py
from arguments import device, existing, positive

try:
    from dcgan_data import Digits, Folder
    from dcgan_judge import JUDGED, SHOWN, Judge, draw
    from dcgan_networks import make_discriminator, make_generator
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}; this recipe needs: pip install scikit-learn matplotlib pillow tqdm")

OUTPUT = Path(__file__).resolve().parents[1] / "output" / "dcgan"
LOSSES = ("errD_real", "errD_fake", "errG")


class Training:
    """The networks, the optimizers, and one of the two APIs of amp around them."""

    def __init__(self, args: argparse.Namespace, data: Digits | Folder) -> None:
        self.args, self.data, self.done = args, data, 0  # epochs
        self.skipped, self.losses = [0, 0], [float("nan")] * 3  # means of the last epoch
        torch.manual_seed(args.manualSeed)
        discriminator, generator = (
            make_discriminator(args, data.channels),
            make_generator(args, data.channels),
        )
        nets = [net.to(args.device) for net in (discriminator, generator)]
        betas = (args.beta1, 0.999)
        self.optimizers = [FusedAdam(net.parameters(), lr=args.lr, betas=betas) for net in nets]
        self.scaling: list[Any]  # the optimizers, as the API wants them
        if args.handle:
            handle = amp.init(device_type=args.device.type)
            of_discriminator, of_generator = self.optimizers
            self.scaling = [
                handle.wrap_optimizer(of_discriminator, num_loss=2),
                handle.wrap_optimizer(of_generator),
            ]
        else:
            nets, self.optimizers = amp.initialize(
                nets, self.optimizers, opt_level=args.opt_level, num_losses=3, verbosity=0
            )
            self.scaling = self.optimizers
        self.discriminator, self.generator = nets
        self.noise_generator = torch.Generator().manual_seed(args.manualSeed)
        self.fixed_noise = self.noise(JUDGED)

    def noise(self, count: int) -> Tensor:
        shape = (count, self.args.nz, 1, 1)
        return torch.randn(shape, generator=self.noise_generator).to(self.args.device)

    def backward(self, loss: Tensor, loss_id: int) -> None:
        """Backward of the scaled loss; 0 and 1 are the discriminator's, 2 is the generator's."""
        optimizer = self.scaling[loss_id // 2]
        if self.args.handle:  # The wrapper counts its losses by itself.
            scaling = optimizer.scale_loss(loss)
        else:
            scaling = amp.scale_loss(loss, optimizer, loss_id=loss_id)
        with scaling as scaled_loss:
            scaled_loss.backward()

    def scales(self) -> list[float]:
        """Return the loss scales of the three losses."""
        if self.args.handle:
            states = [s for each in self.scaling for s in each.state_dict()["loss_scalers"]]
        else:
            states = [amp.state_dict()[f"loss_scaler{i}"] for i in range(3)]
        return [state["loss_scale"] for state in states]

    def step(self, real: Tensor) -> list[Tensor]:
        """Update the discriminator, then the generator, and return the three losses."""
        fake = self.generator(self.noise(len(real)))
        self.discriminator.zero_grad()
        loss_real = logistic_loss(self.discriminator(real), 1.0)
        self.backward(loss_real, 0)
        loss_fake = logistic_loss(self.discriminator(fake.detach()), 0.0)
        self.backward(loss_fake, 1)
        self.scaling[0].step()
        self.generator.zero_grad()
        loss_generator = logistic_loss(self.discriminator(fake), 1.0)
        self.backward(loss_generator, 2)
        self.scaling[1].step()
        self.skipped = [
            count + amp.step_was_skipped(optimizer)
            for count, optimizer in zip(self.skipped, self.optimizers, strict=True)
        ]
        return [loss_real.detach(), loss_fake.detach(), loss_generator.detach()]

    def epoch(self, bar: Any) -> None:
        order = torch.Generator().manual_seed(self.args.manualSeed + self.done)
        loader = DataLoader(
            self.data,
            self.args.batchSize,
            shuffle=True,
            drop_last=True,
            num_workers=self.args.workers,
            generator=order,
        )
        losses = []
        for real in loader:
            losses.append(torch.stack(self.step(real.to(self.args.device))))
            bar.update()
        self.done += 1
        self.losses = torch.stack(losses).float().mean(0).tolist()
        shown = zip(LOSSES, self.losses, strict=True)
        bar.set_postfix_str(" ".join(f"{name} {loss:.3f}" for name, loss in shown))

    @torch.no_grad()
    def generate(self) -> Tensor:
        """Return JUDGED images, always of the same noise."""
        self.generator.eval()
        images = self.generator(self.fixed_noise).float().cpu()
        self.generator.train()
        return images

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": settings(self.args),
            "netD": self.discriminator.state_dict(),
            "netG": self.generator.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.scaling],
            "amp": {} if self.args.handle else amp.state_dict(),
            "noise": self.noise_generator.get_state(),
            "progress": [self.done, self.skipped, self.losses],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.discriminator.load_state_dict(state["netD"])
        self.generator.load_state_dict(state["netG"])
        for optimizer, each in zip(self.scaling, state["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        if not self.args.handle:
            amp.load_state_dict(state["amp"])
        self.noise_generator.set_state(state["noise"])
        self.done, self.skipped, self.losses = state["progress"]


def logistic_loss(logits: Tensor, target: float) -> Tensor:
    """binary_cross_entropy, which amp refuses in float16, of the sigmoid of logits."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a run must have in common with the one that it resumes."""
    names = ["dataroot", "imageSize", "nz", "ngf", "ndf", "batchSize", "manualSeed", "opt_level"]
    return {name: str(getattr(args, name)) for name in [*names, "handle"]}


def resume(training: Training, path: Path) -> None:
    try:
        state = apex_mp.load_checkpoint(path)
    except (OSError, pickle.UnpicklingError) as error:
        sys.exit(f"--resume {path}: {error}")
    if not isinstance(state, dict) or "settings" not in state:
        sys.exit(f"--resume {path} is no checkpoint of this program")
    for name, value in settings(training.args).items():
        if state["settings"][name] != value:
            saved = state["settings"][name]
            sys.exit(f"--resume {path} was saved with {name} {saved}, and {name} is {value} now")
    training.load_state_dict(state)


def table(training: Training, judge: Judge, untrained: Tensor, generated: Tensor) -> str:
    api = "amp.init, wrap_optimizer" if training.args.handle else "amp.initialize"
    rows = [f"{api}, {training.args.opt_level}, {training.done} epochs", ""]
    rows += ["| images               | score, 1-10 | distance |"]
    rows += ["| -------------------- | ----------: | -------: |"]
    rows += [judge.row("of the data", judge.images[:JUDGED])]
    rows += [judge.row("before training", untrained), judge.row("generated", generated), ""]
    rows += ["| loss      | last epoch | loss scale | steps skipped |"]
    rows += ["| --------- | ---------: | ---------: | ------------: |"]
    for i, (name, scale) in enumerate(zip(LOSSES, training.scales(), strict=True)):
        skipped = training.skipped[i // 2]
        rows += [f"| {name:<9} | {training.losses[i]:10.3f} | {scale:10.0f} | {skipped:13} |"]
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.outf.mkdir(parents=True, exist_ok=True)
    data = (
        Digits(args.imageSize) if args.dataroot is None else Folder(args.dataroot, args.imageSize)
    )
    if len(data) < max(args.batchSize, SHOWN):
        sys.exit(
            f"there are {len(data)} images; there must be {max(args.batchSize, SHOWN)} at least"
        )
    training, judge = Training(args, data), Judge(data)
    untrained = training.generate()
    if args.resume:
        resume(training, args.resume)
    steps = len(data) // args.batchSize
    todo, done = args.niter * steps, training.done * steps
    with tqdm(total=todo, initial=done, unit="step", disable=None, file=sys.stderr) as bar:
        while training.done < args.niter:
            training.epoch(bar)
            apex_mp.save_checkpoint(training.state_dict(), args.outf / "checkpoint.pt")
    generated = training.generate()
    pictures = {"before training": untrained, "generated": generated, "data": judge.images}
    draw(pictures, args.picture or args.outf / "dcgan.png")
    print(table(training, judge, untrained, generated))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, default: Any, text: str, **options: Any) -> None:
        parser.add_argument(name, default=default, help=f"{text} [{default}]", **options)

    add("--dataroot", None, "a folder of images; None: the digits of scikit-learn", type=existing)
    add("--opt_level", "O1", "of amp.initialize", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--handle", action="store_true", help="the older API, which casts as O1")
    add("--imageSize", 16, "pixels of a side: 8, 16, 32, 64 and so on", type=positive)
    add("--batchSize", 64, "images a step", type=positive)
    add("--niter", 24, "epochs in all, those before --resume counted", type=positive)
    add("--lr", 0.004, "learning rate of both optimizers", type=float)
    add("--beta1", 0.5, "of both optimizers", type=float)
    add("--nz", 32, "numbers of noise that the generator makes an image of", type=positive)
    add("--ngf", 16, "channels of the generator's last layer but one", type=positive)
    add("--ndf", 16, "channels of the discriminator's first layer", type=positive)
    add("--workers", 0, "processes that load images", type=int)
    add("--manualSeed", 0, "of weights, noise and order", type=int)
    add("--outf", OUTPUT, "folder for dcgan.png and checkpoint.pt", type=Path)
    add("--picture", None, "another file for the picture", type=Path)
    add("--resume", None, "go on from a checkpoint", type=existing)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", where, "cpu or cuda", type=device)
    args = parser.parse_args(argv)
    if args.imageSize < 8 or args.imageSize & (args.imageSize - 1):
        parser.error(f"--imageSize is {args.imageSize}; it must be 8, 16, 32, 64 and so on")
    if args.handle and args.opt_level != "O1":
        parser.error(f"--handle casts as O1; --opt_level {args.opt_level} goes without it")
    return args


if __name__ == "__main__":
    main()

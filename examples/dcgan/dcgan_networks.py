"""The two networks of examples/dcgan."""

from __future__ import annotations

import argparse
import itertools

from torch import nn


def sizes_to(image_size: int) -> list[int]:
    """Return 4, 8 and so on, to the half of the images' side: what the networks go through."""
    return [4 * 2**i for i in range((image_size // 4).bit_length() - 1)]


def make_generator(args: argparse.Namespace, channels: int) -> nn.Sequential:
    """Noise of nz x 1 x 1 to an image, twice as large and half as deep with every layer."""
    widths = [args.ngf * size // 4 for size in reversed(sizes_to(args.imageSize))]
    layers: list[nn.Module] = [nn.ConvTranspose2d(args.nz, widths[0], 4, bias=False)]
    for width, next_width in zip(widths, [*widths[1:], channels], strict=True):
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.ConvTranspose2d(width, next_width, 4, 2, 1, bias=False)]
    return nn.Sequential(*layers, nn.Tanh()).apply(initialize_weights)


def make_discriminator(args: argparse.Namespace, channels: int) -> nn.Sequential:
    """An image to one logit, half as large and twice as deep with every layer."""
    widths = [args.ndf * size // 4 for size in sizes_to(args.imageSize)]
    layers: list[nn.Module] = []
    for width, next_width in itertools.pairwise([channels, *widths]):
        is_first = not layers
        layers.append(nn.Conv2d(width, next_width, 4, 2, 1, bias=False))
        if not is_first:
            layers.append(nn.BatchNorm2d(next_width))
        layers.append(nn.LeakyReLU(0.2, inplace=True))
    layers += [nn.Conv2d(widths[-1], 1, 4, bias=False), nn.Flatten(0)]
    return nn.Sequential(*layers).apply(initialize_weights)


def initialize_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)

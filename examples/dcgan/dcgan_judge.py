"""How good generated images are, and the picture of them."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F  # noqa: N812
from dcgan_data import Digits, Folder
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

SHOWN, JUDGED = 64, 1024  # images in the picture, and those that the table judges


class Judge:
    """Says how much images look like the data, by pixels of 8 x 8."""

    def __init__(self, data: Digits | Folder) -> None:
        count = min(len(data), 2 * JUDGED)
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
        self.images = torch.stack([data[i] for i in chosen.tolist()])
        self.pixels = self._small(self.images)
        self.classifier = None
        if data.labels is not None:
            self.classifier = KNeighborsClassifier(10).fit(self.pixels, data.labels[chosen])

    @staticmethod
    def _small(images: Tensor) -> Tensor:
        return F.interpolate(images, 8, mode="area").flatten(1).double()

    def distance(self, images: Tensor) -> float:
        """Return the Frechet distance of two normal distributions: 0 if all is as in the data."""
        (mean, covariance), (other_mean, other) = (
            (pixels.mean(0), pixels.T.cov()) for pixels in (self.pixels, self._small(images))
        )
        root = torch.linalg.eigvals(covariance @ other).real.clamp(min=0).sqrt().sum()
        traces = covariance.trace() + other.trace()
        return float((mean - other_mean).square().sum() + traces - 2 * root)

    def score(self, images: Tensor) -> float:
        """Return 10 if each image is surely a digit and all digits are as frequent; 1 at worst."""
        if self.classifier is None:
            return float("nan")
        p = torch.from_numpy(self.classifier.predict_proba(self._small(images)))
        return float(torch.xlogy(p, p / p.mean(0)).nansum(1).mean().exp())

    def row(self, name: str, images: Tensor) -> str:
        return f"| {name:<20} | {self.score(images):11.2f} | {self.distance(images):8.2f} |"


def draw(pictures: dict[str, Tensor], path: Path) -> None:
    """Write the first images of each to one file, as squares side by side."""
    figure, axes = plt.subplots(1, len(pictures), figsize=(4 * len(pictures), 4.3))
    for axis, (name, images) in zip(axes, pictures.items(), strict=True):
        side = int(SHOWN**0.5)
        images = F.pad(images[:SHOWN], (1, 1, 1, 1), value=-1.0)
        _, channels, height, width = images.shape
        grid = images.view(side, side, channels, height, width).permute(0, 3, 1, 4, 2)
        grid = (grid.reshape(side * height, side * width, channels) + 1) / 2
        axis.imshow(grid, cmap="gray_r" if channels == 1 else None, vmin=0, vmax=1)
        axis.set_title(name)
        axis.axis("off")
    figure.savefig(path, dpi=80, bbox_inches="tight")
    plt.close(figure)

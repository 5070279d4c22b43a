"""Synthetic images of winding regions: colour every pixel like the dot of its region.

Walls of one pixel divide a grid into regions, and each region has one dot. Which dot belongs to a pixel depends on the
walls between them, not on their distance. Regions may also be curves of one pixel with walls everywhere else: which dot
is a pixel connected to? That is Pathfinder's question, asked at every pixel. An image is a function of the
configuration, the split and its index.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ppma.config import require
from ppma.data.curves import draw_curves
from ppma.data.drawing import colour_of
from ppma.data.label_maps import IGNORED

SPLITS = ("train", "val", "test", "larger", "scaled")
_FEWEST = 4  # pixels of a region with a dot
_LIMITS = {
    "size": 256,
    "cells": 4096,
    "regions": 1024,
    "colours": 64,
    "length": 4096,
    "train_images": 10**9,
    "eval_images": 10**6,
}


@dataclass(frozen=True)
class RegionsDataConfig:
    """The images and their difficulty.

    Attributes:
        size: side of the grid in pixels.
        shape: "cells", regions grown from Voronoi cells with walls of one pixel between them; or "curves" of one pixel.
        cells: Voronoi cells; more of them make the outlines of the regions more winding.
        regions: regions that these cells are grown into; or the number of curves, as far as there is room.
        length: pixels of the longest curve.
        turns: probability that a curve turns at a pixel.
        colours: colours of dots, the classes.
        gaps: share of the wall's pixels that are missing from the image.
        noise: standard deviation of the noise on every channel; walls and dots have the value 1.
        train_images: training images; no image repeats within an epoch.
        eval_images: images of "val" and of "test"; the splits of larger grids have a quarter of them.
        seed: seed of all images.
    """

    size: int = 20
    shape: Literal["cells", "curves"] = "cells"
    cells: int = 30
    regions: int = 6
    length: int = 30
    turns: float = 0.2
    colours: int = 4
    gaps: float = 0.0
    noise: float = 0.0
    train_images: int = 100_000
    eval_images: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"size": 4, "cells": 2, "regions": 2, "colours": 2, "length": 4, "train_images": 1, "eval_images": 4}
        for key, low in least.items():
            value = getattr(self, key)
            require(low <= value <= _LIMITS[key], key, f"a number from {low} to {_LIMITS[key]:,}", value)
        fits = self.shape == "curves" or self.regions <= self.cells
        require(fits, "regions", f"at most the {self.cells} cells", self.regions)
        for key in ("gaps", "turns"):
            require(0 <= getattr(self, key) <= 1, key, "a share from 0 to 1", getattr(self, key))
        require(0 <= self.noise <= 100, "noise", "a number from 0 to 100", self.noise)
        require(self.seed >= 0, "seed", "0 or more", self.seed)

    @property
    def channels(self) -> int:
        """Channels of an image: the walls, and the dots of each colour."""
        return 1 + self.colours


class Regions(Dataset):
    """The images of a split: (channels, H, W), float32, and the colour of every pixel, (H, W), int64.

    Walls, and regions too small for a dot, have the label `IGNORED`.

    Args:
        config: the images.
        split: "train", "val" or "test"; "larger", grids of twice the side with four times the cells and regions; or
            "scaled", grids of twice the side with cells and regions twice as large, or with twice as many curves of
            twice the length.

    Examples:
        >>> from ppma.data.regions import Regions, RegionsDataConfig
        >>> image, labels = Regions(RegionsDataConfig(size=12), "larger")[0]
        >>> image.shape, labels.shape
        (torch.Size([5, 24, 24]), torch.Size([24, 24]))
    """

    def __init__(self, config: RegionsDataConfig, split: str) -> None:
        require(split in SPLITS, "split", f"one of {', '.join(SPLITS)}", split)
        self.config, self.split = config, split
        larger = split in ("larger", "scaled")
        self.size = config.size * (2 if larger else 1)
        longer = 2 if split == "scaled" and config.shape == "curves" else 1
        denser = 4 if split == "larger" else longer
        self.cells, self.regions, self.length = config.cells * denser, config.regions * denser, config.length * longer
        self.count = config.train_images if split == "train" else config.eval_images // (4 if larger else 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        config = self.config
        generator = np.random.default_rng((config.seed, SPLITS.index(self.split), index))
        if config.shape == "curves":
            regions = draw_curves(generator, self.size, self.regions, self.length, config.turns)
            wall = regions < 0
        else:
            regions = _regions(generator, self.size, self.cells, self.regions)
            wall = _walls(regions)
        image = np.zeros((config.channels, *wall.shape), np.float32)
        labels = np.full(wall.shape, IGNORED, np.int64)
        image[0] = wall & (generator.random(wall.shape) >= config.gaps)
        for region in range(self.regions):
            inside = (regions == region) & ~wall
            rows, columns = np.nonzero(inside)
            if len(rows) < _FEWEST:
                continue
            dot, colour = generator.integers(len(rows)), generator.integers(config.colours)
            image[1 + colour, rows[dot], columns[dot]] = 1
            labels[inside] = colour
        if config.noise:
            image += config.noise * generator.standard_normal(image.shape, np.float32)
        return torch.from_numpy(image), torch.from_numpy(labels)


def draw_regions(image: Tensor, labels: Tensor) -> Tensor:
    """An image and the colours of its pixels as RGB: walls are black, dots stronger than their regions.

    Args:
        image: (channels, H, W).
        labels: (H, W).

    Returns:
        (H, W, 3), uint8.
    """
    table = torch.tensor([colour_of(label) for label in range(len(image) - 1)], dtype=torch.uint8)
    drawn = table[labels.clamp(max=len(table) - 1)] // 2 + 127
    drawn[labels == IGNORED] = 255
    drawn[image[0] > 0.5] = 0
    dots = image[1:].max(0)
    return torch.where((dots.values > 0.5)[..., None], table[dots.indices], drawn)


def _regions(generator: np.random.Generator, size: int, cells: int, regions: int) -> np.ndarray:
    """The region of every pixel, (size, size): Voronoi cells that grow together from random ones."""
    points = generator.uniform(0, size, (cells, 2))
    rows, columns = np.mgrid[:size, :size]
    cell = ((rows[..., None] - points[:, 0]) ** 2 + (columns[..., None] - points[:, 1]) ** 2).argmin(-1)
    adjacent = np.zeros((cells, cells), bool)
    adjacent[cell[:-1], cell[1:]] = adjacent[cell[:, :-1], cell[:, 1:]] = True
    neighbours = [np.flatnonzero(row) for row in adjacent | adjacent.T]
    region = np.full(cells, -1)
    grown = list(generator.choice(cells, regions, replace=False))
    region[grown] = np.arange(regions)
    while grown:
        place = int(generator.integers(len(grown)))
        free = [one for one in neighbours[grown[place]] if region[one] < 0]
        if not free:
            grown.pop(place)
            continue
        taken = free[int(generator.integers(len(free)))]
        region[taken] = region[grown[place]]
        grown.append(taken)
    return region[cell]


def _walls(regions: np.ndarray) -> np.ndarray:
    """The pixels with another region below, to the right, or below to the right, (H, W), bool."""
    wall = np.zeros(regions.shape, bool)
    wall[:-1] |= regions[:-1] != regions[1:]
    wall[:, :-1] |= regions[:, :-1] != regions[:, 1:]
    wall[:-1, :-1] |= regions[:-1, :-1] != regions[1:, 1:]
    return wall

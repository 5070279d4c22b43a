"""Augmentation of images, boxes and masks with torchvision's transforms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchvision.transforms import v2

from ppma.config import require

MAX_SIDE = 16384  # pixels of a scaled image


@dataclass(frozen=True)
class CocoAugmentConfig:
    """Augmentation of training images.

    Attributes:
        short_sides: target lengths of the shorter side; one is drawn for each image.
        long_side: maximum length of the longer side, before a crop and after it; an image that would exceed it is
            scaled to it instead.
        hflip: probability of a horizontal flip.
        crop_short_sides: if not empty, half of the images are first scaled to a shorter side drawn from these and
            cropped.
        crop_sides: minimum and maximum height and width of that crop.
        antialias: filter images before they are reduced; OpenCV, and so MMDetection, does not.
    """

    short_sides: tuple[int, ...] = (800,)
    long_side: int = 1333
    hflip: float = 0.5
    crop_short_sides: tuple[int, ...] = ()
    crop_sides: tuple[int, int] = (384, 600)
    antialias: bool = True

    def __post_init__(self) -> None:
        require(0 <= self.hflip <= 1, "hflip", "a probability", self.hflip)
        require(min(self.short_sides, default=0) >= 1, "short_sides", "one or more numbers >= 1", self.short_sides)
        limits = f"at least the short sides and at most {MAX_SIDE}"
        require(max(self.short_sides) <= self.long_side <= MAX_SIDE, "long_side", limits, self.long_side)
        valid = all(1 <= side <= MAX_SIDE for side in self.crop_short_sides)
        require(valid, "crop_short_sides", f"numbers from 1 to {MAX_SIDE}", self.crop_short_sides)
        low, high = self.crop_sides
        require(1 <= low <= high <= MAX_SIDE, "crop_sides", f"two ascending numbers, 1 to {MAX_SIDE}", self.crop_sides)


class RandomSizeCrop(v2.Transform):
    """A crop of random height and width, each in `sides` and at most the image's."""

    def __init__(self, sides: tuple[int, int]) -> None:
        super().__init__()
        self.sides = sides

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        extent = v2.functional.get_size(flat_inputs[0])
        low, high = self.sides
        size = [_between(min(low, whole), min(high, whole)) for whole in extent]
        top, left = (_between(0, whole - part) for whole, part in zip(extent, size, strict=True))
        return {"top": top, "left": left, "height": size[0], "width": size[1]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.crop(inpt, **params)


def _between(low: int, high: int) -> int:
    """A random integer in [low, high] from torch's generator."""
    return int(torch.randint(low, high + 1, ()))


def train_transform(augment: CocoAugmentConfig) -> Callable[..., Any]:
    """The transform of an image (3, H, W), uint8, and its target; the result is float32 in [0, 1]."""
    scale, first = (
        v2.RandomShortestSize(list(sides), augment.long_side, antialias=augment.antialias)
        for sides in (augment.short_sides, augment.crop_short_sides)
    )
    if augment.crop_short_sides:
        scale = v2.RandomChoice([scale, v2.Compose([first, RandomSizeCrop(augment.crop_sides), scale])])
    return v2.Compose(
        [
            scale,
            v2.RandomHorizontalFlip(augment.hflip),
            v2.ToDtype(torch.float32, scale=True),
            v2.ClampBoundingBoxes(),
            v2.SanitizeBoundingBoxes(),
            v2.ToPureTensor(),
        ]
    )

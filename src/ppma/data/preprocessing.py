"""How a classifier wants its images."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from timm.data import create_transform

from ppma.config import require

Transform = Callable[[Image.Image], torch.Tensor]
_LARGEST_IMAGE = 16384


@dataclass(frozen=True)
class Preprocessing:
    """From an image to the tensor that a model sees.

    Attributes:
        image_size: side of the square.
        interpolation: of resizing.
        mean: of the channels, subtracted.
        std: of the channels, divided by.
        crop_pct: share of the resized image's side that the centre crop keeps.
    """

    image_size: int
    interpolation: Literal["bicubic", "bilinear", "nearest"]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop_pct: float

    def __post_init__(self) -> None:
        require(1 <= self.image_size <= _LARGEST_IMAGE, "image_size", f"1 to {_LARGEST_IMAGE}", self.image_size)
        require(all(map(math.isfinite, self.mean)), "mean", "finite numbers", self.mean)
        require(all(0 < value < math.inf for value in self.std), "std", "finite numbers > 0", self.std)
        require(0 < self.crop_pct <= 1, "crop_pct", "a number in (0, 1]", self.crop_pct)

    @classmethod
    def from_config(cls, data: object) -> "Preprocessing":
        """The preprocessing of a configuration that has these fields among others, such as `ImageDataConfig`."""
        return cls(**{field.name: getattr(data, field.name) for field in dataclasses.fields(cls)})

    @classmethod
    def from_timm(cls, pretrained_cfg: Mapping[str, Any]) -> "Preprocessing":
        """The preprocessing that a timm model's `pretrained_cfg` describes."""
        return cls(
            image_size=pretrained_cfg["input_size"][-1],
            interpolation=pretrained_cfg["interpolation"],
            mean=tuple(pretrained_cfg["mean"]),
            std=tuple(pretrained_cfg["std"]),
            crop_pct=pretrained_cfg["crop_pct"],
        )

    def transform(self) -> Transform:
        """Resize, centre crop; to a normalised (3, image_size, image_size) tensor."""
        return create_transform(
            self.image_size,
            is_training=False,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
        )

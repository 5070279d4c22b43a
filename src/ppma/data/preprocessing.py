"""From images to tensors."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from timm.data import create_transform
from torchvision.transforms.v2.functional import pil_to_tensor, to_dtype

from ppma.config import require

Transform = Callable[[Image.Image], torch.Tensor]
_LARGEST_IMAGE = 16384


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of a classifier: resize, centre crop, normalise.

    Attributes:
        image_size: side of the square input, in pixels.
        interpolation: resampling filter.
        mean: subtracted from each channel.
        std: each channel is divided by it.
        crop_pct: fraction of the resized image's side that the centre crop keeps.

    Examples:
        >>> from PIL import Image
        >>> from ppma.data.preprocessing import Preprocessing
        >>> preprocessing = Preprocessing(32, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), crop_pct=0.9)
        >>> preprocessing.transform()(Image.new("RGB", (64, 48))).shape
        torch.Size([3, 32, 32])
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
        """Take these fields from a configuration that has more, such as `ImageDataConfig`."""
        return cls(**{field.name: getattr(data, field.name) for field in dataclasses.fields(cls)})

    @classmethod
    def from_timm(cls, pretrained_cfg: Mapping[str, Any]) -> "Preprocessing":
        """Take the preprocessing from a timm model's `pretrained_cfg`."""
        return cls(
            image_size=pretrained_cfg["input_size"][-1],
            interpolation=pretrained_cfg["interpolation"],
            mean=tuple(pretrained_cfg["mean"]),
            std=tuple(pretrained_cfg["std"]),
            crop_pct=pretrained_cfg["crop_pct"],
        )

    def to_timm(self) -> dict[str, Any]:
        """The entries of a timm model's `pretrained_cfg`, the inverse of `from_timm`."""
        fields = dataclasses.asdict(self)
        size = fields.pop("image_size")
        return {"input_size": (3, size, size), **fields}

    def transform(self) -> Transform:
        """The transform from an image to a normalised (3, image_size, image_size) tensor."""
        return create_transform(
            self.image_size,
            is_training=False,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
        )


def image_tensor(image: Image.Image) -> torch.Tensor:
    """Convert an RGB image to a (3, H, W) float32 tensor in [0, 1], for models that resize images themselves."""
    return to_dtype(pil_to_tensor(image), torch.float32, scale=True)

"""Augmentation of images with label maps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from ppma.config import require
from ppma.data.label_maps import IGNORED
from ppma.data.photometric import PhotometricDistortion
from ppma.data.segmentation import MAX_SIDE, SegmentationDataConfig

CROP_TRIES = 10


@dataclass(frozen=True)
class SegmentationAugmentConfig:
    """Random changes of training images.

    Attributes:
        ratio: range of the factor by which the resized size is multiplied.
        crop: side of the square crop; smaller images are padded.
        class_share: a crop is drawn again, at most ten times, while one class has more than this share of its pixels.
        hflip: probability of a horizontal flip.
        photometric: distort brightness, contrast, saturation and hue, see `PhotometricDistortion`.
    """

    ratio: tuple[float, float] = (0.5, 2.0)
    crop: int = 512
    class_share: float = 0.75
    hflip: float = 0.5
    photometric: bool = True

    def __post_init__(self) -> None:
        low, high = self.ratio
        require(0 < low <= high, "ratio", "two ascending numbers > 0", self.ratio)
        require(1 <= self.crop <= MAX_SIDE, "crop", f"1 to {MAX_SIDE}", self.crop)
        require(0 < self.class_share <= 1, "class_share", "a number in (0, 1]", self.class_share)
        require(0 <= self.hflip <= 1, "hflip", "a probability", self.hflip)


class RandomScale(v2.Transform):
    """Resize to the configured size, multiplied by a random ratio."""

    def __init__(self, data: SegmentationDataConfig, ratio: tuple[float, float]) -> None:
        super().__init__()
        self.data, self.ratio = data, ratio

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        low, high = self.ratio
        ratio = low + (high - low) * float(torch.rand(()))
        height, width = v2.functional.get_size(flat_inputs[0])
        return {"size": list(self.data.scaled(height, width, ratio))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.resize(inpt, **params, antialias=self.data.antialias)


class VariedCrop(v2.Transform):
    """Crop a square that no single class fills."""

    def __init__(self, side: int, class_share: float) -> None:
        super().__init__()
        self.side, self.class_share = side, class_share

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        labels = next(part for part in flat_inputs if isinstance(part, tv_tensors.Mask))
        height, width = labels.shape[-2:]
        size = {"height": min(self.side, height), "width": min(self.side, width)}
        for _ in range(CROP_TRIES):
            top = int(torch.randint(height - size["height"] + 1, ()))
            left = int(torch.randint(width - size["width"] + 1, ()))
            if self._varied(labels[..., top : top + size["height"], left : left + size["width"]]):
                break
        return {"top": top, "left": left, **size}

    def _varied(self, labels: Tensor) -> bool:
        known = labels[labels != IGNORED]
        counts = torch.bincount(known.flatten())
        return int((counts > 0).sum()) > 1 and float(counts.max() / counts.sum()) < self.class_share

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.crop(inpt, **params)


class PadTo(v2.Transform):
    """Pad to a square at the right and the bottom, the image with 0 and the labels with `IGNORED`."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.functional.get_size(flat_inputs[0])
        return {"padding": [0, 0, max(0, self.side - width), max(0, self.side - height)]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.pad(inpt, params["padding"], fill=IGNORED if isinstance(inpt, tv_tensors.Mask) else 0)


def train_transform(data: SegmentationDataConfig, augment: SegmentationAugmentConfig) -> Callable[..., Any]:
    """From an image (3, H, W), uint8, and its labels (H, W) to both cropped, the image normalised and float32."""
    distortion: list[v2.Transform] = [PhotometricDistortion()] if augment.photometric else []
    return v2.Compose(
        [
            RandomScale(data, augment.ratio),
            VariedCrop(augment.crop, augment.class_share),
            v2.RandomHorizontalFlip(augment.hflip),
            *distortion,
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
            v2.Normalize(list(data.mean), list(data.std)),
            PadTo(augment.crop),  # after the normalisation, so that the padding has the mean colour
            v2.ToPureTensor(),
        ]
    )

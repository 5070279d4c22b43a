"""Images with label maps in ADE20K's layout: `images/SPLIT/NAME.jpg` and `annotations/SPLIT/NAME.png`."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as transforms

from ppma.config import require
from ppma.data.pixels import image_tensor
from ppma.data.source import decode
from ppma.engine.task import BrokenSampleError

IGNORED = 255
MOST_CLASSES = 254  # in one byte, beside 0 for no label and 255 for ignored
_SUFFIXES = (".jpg", ".jpeg", ".png")
_PLAIN_NAMES, _OFFICIAL_NAMES = "classes.txt", "objectInfo150.txt"


@dataclass(frozen=True)
class Ade20kDataConfig:
    """Where images with label maps lie. In a map, 0 is no label, and 1, 2, ... are the classes.

    Attributes:
        root: the folder.
        train_split: of training.
        val_split: chooses the best weights.
        classes: names; None to read them from the folder: classes.txt (a name on each line), or ADE20K's
            objectInfo150.txt.
        short_side: images are scaled, keeping their shape, to fit this
        long_side: by this, as large as they can.
        mean: of the channels of images in [0, 1], subtracted.
        std: of the channels, divided by.
    """

    root: str
    train_split: str = "training"
    val_split: str = "validation"
    classes: tuple[str, ...] | None = None
    short_side: int = 512
    long_side: int = 2048
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD

    def __post_init__(self) -> None:
        require(1 <= self.short_side <= self.long_side, "short_side", "1 to long_side", self.short_side)
        count = None if self.classes is None else len(self.classes)
        require(count is None or 2 <= count <= MOST_CLASSES, "classes", f"2 to {MOST_CLASSES} names", self.classes)

    def scaled(self, height: int, width: int, ratio: float = 1.0) -> tuple[int, int]:
        """The height and width an image is scaled to, times `ratio`."""
        factor = ratio * min(self.long_side / max(height, width), self.short_side / min(height, width))
        return max(1, round(height * factor)), max(1, round(width * factor))


def class_names(data: Ade20kDataConfig) -> tuple[str, ...]:
    """The configured classes, or those that the folder names."""
    if data.classes is not None:
        return data.classes
    plain, official = Path(data.root) / _PLAIN_NAMES, Path(data.root) / _OFFICIAL_NAMES
    if plain.is_file():
        names = [line.strip() for line in plain.read_text(encoding="utf-8").splitlines() if line.strip()]
    elif official.is_file():
        rows = official.read_text(encoding="utf-8").splitlines()[1:]  # Idx, Ratio, Train, Val, Stuff, Name
        names = [row.split("\t")[-1].strip() for row in rows if row.strip()]
    else:
        raise ValueError(f"data.classes: expected names, or {_PLAIN_NAMES} or {_OFFICIAL_NAMES} in {data.root}")
    if not 2 <= len(names) <= MOST_CLASSES:
        raise ValueError(f"data.root: expected 2 to {MOST_CLASSES} classes, found {len(names)} in {data.root}")
    return tuple(names)


class Ade20kImages(Dataset):
    """One split.

    A sample is an image (3, H, W) and its labels (H, W), int64, where `IGNORED` is no label. For training, `transform`
    makes it of a uint8 image; for evaluation the image is in [0, 1] and has its own size.

    Args:
        data: where it lies.
        split: which.
        transform: of image and labels; None for evaluation.

    Attributes:
        classes: names, in the order of the labels.
    """

    def __init__(self, data: Ade20kDataConfig, split: str, transform: Callable[..., Any] | None = None) -> None:
        self.transform = transform
        self.classes = class_names(data)
        images, maps = (Path(data.root) / kind / split for kind in ("images", "annotations"))
        for folder in (images, maps):
            if not folder.is_dir():
                raise ValueError(f"data.root: expected a folder {folder}, found none")
        found = sorted(path for path in images.iterdir() if path.suffix.lower() in _SUFFIXES)
        self.pairs = [(path, maps / f"{path.stem}.png") for path in found if (maps / f"{path.stem}.png").is_file()]
        lacking = len(found) - len(self.pairs)
        if not self.pairs:
            raise ValueError(f"data.root: expected images with label maps in {images} and {maps}, found none")
        if lacking:
            warnings.warn(f"{images}: left out: {lacking} images without a label map in {maps}", stacklevel=2)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image_path, map_path = self.pairs[index]
        image, labels = decode(image_path, str(image_path)), self._labels(map_path)
        if labels.shape != (image.height, image.width):
            raise BrokenSampleError(
                f"{map_path}: {labels.shape[1]} x {labels.shape[0]} labels, but the image has "
                f"{image.width} x {image.height} pixels"
            )
        if self.transform is None:
            return image_tensor(image), torch.from_numpy(labels)
        pixels = tv_tensors.Image(transforms.pil_to_tensor(image))
        return self.transform(pixels, tv_tensors.Mask(torch.from_numpy(labels)))

    def _labels(self, path: Path) -> np.ndarray:
        """Labels from 0 on: (H, W), int64."""
        try:
            with Image.open(path) as file:
                raw = np.asarray(file)
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise BrokenSampleError(f"{path}: {error or type(error).__name__}") from None
        if raw.ndim != 2:
            raise BrokenSampleError(f"{path}: expected one label for each pixel, found {raw.shape[-1]} channels")
        labels = raw.astype(np.int64) - 1
        labels[(raw == 0) | (raw == IGNORED)] = IGNORED
        wrong = labels[(labels >= len(self.classes)) & (labels != IGNORED)]
        if wrong.size:
            raise BrokenSampleError(
                f"{path}: label {wrong.max() + 1} out of range, expected 0 to {len(self.classes)} or {IGNORED}"
            )
        return labels

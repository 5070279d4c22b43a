"""Images with label maps in ADE20K's layout: `images/SPLIT/NAME.jpg` and `annotations/SPLIT/NAME.png`."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as transforms

from ppma.config import require
from ppma.data.decoding import IMAGE_SUFFIXES, decode, decode_labels, image_size
from ppma.data.errors import LabelFormatError
from ppma.data.label_maps import LARGEST_VALUE, Convention, LabelFormat, count_labels, spread
from ppma.data.preprocessing import image_tensor

MOST_CLASSES = 254  # in one byte, beside 0 for no label and 255 for ignored
SAMPLED_MAPS = 50  # are read before a run
_PLAIN_NAMES, _OFFICIAL_NAMES = "classes.txt", "objectInfo150.txt"


@dataclass(frozen=True)
class Ade20kDataConfig:
    """Where images with label maps lie, and what the values in the maps mean.

    Attributes:
        root: the folder.
        train_split: of training.
        val_split: chooses the best weights.
        classes: names; None to read them from the folder: classes.txt (a name on each line), or ADE20K's
            objectInfo150.txt.
        labels: "ade20k": in a map 0 is ignored and k is class k - 1. "plain": k is class k, 255 is ignored. None is
            "ade20k" with a warning.
        ignore_index: a value that is ignored in place of 255 ("plain"), or beside 0 ("ade20k").
        short_side: images are scaled, keeping their shape, to fit this
        long_side: by this, as large as they can.
        mean: of the channels of images in [0, 1], subtracted.
        std: of the channels, divided by.
    """

    root: str
    train_split: str = "training"
    val_split: str = "validation"
    classes: tuple[str, ...] | None = None
    labels: Convention | None = None
    ignore_index: int | None = None
    short_side: int = 512
    long_side: int = 2048
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD

    def __post_init__(self) -> None:
        require(1 <= self.short_side <= self.long_side, "short_side", "1 to long_side", self.short_side)
        count = None if self.classes is None else len(self.classes)
        require(count is None or 2 <= count <= MOST_CLASSES, "classes", f"2 to {MOST_CLASSES} names", self.classes)
        require(count == len(set(self.classes or ())) or count is None, "classes", "different names", self.classes)
        index = self.ignore_index
        require(index is None or 0 <= index <= LARGEST_VALUE, "ignore_index", f"0 to {LARGEST_VALUE}, or null", index)

    def scaled(self, height: int, width: int, ratio: float = 1.0) -> tuple[int, int]:
        """The height and width an image is scaled to, times `ratio`."""
        factor = ratio * min(self.long_side / max(height, width), self.short_side / min(height, width))
        return max(1, round(height * factor)), max(1, round(width * factor))


def class_names(data: Ade20kDataConfig) -> tuple[str, ...]:
    """The configured classes, or those that the folder names."""
    source, named = _names_in(Path(data.root))
    if data.classes is not None:
        if named and len(named) != len(data.classes):
            raise ValueError(f"data.classes: expected {len(named)} names, as {source} has, got {len(data.classes)}")
        return data.classes
    if source is None:
        raise ValueError(f"data.classes: expected names, or {_PLAIN_NAMES} or {_OFFICIAL_NAMES} in {data.root}")
    if not 2 <= len(named) <= MOST_CLASSES:
        raise ValueError(f"data.root: expected 2 to {MOST_CLASSES} classes, found {len(named)} in {source}")
    twice = [name for name, times in Counter(named).items() if times > 1]
    if twice:
        raise ValueError(f"{source}: expected different names, found {twice[0]!r} more than once")
    return tuple(named)


def _names_in(root: Path) -> tuple[Path | None, list[str]]:
    """The file of a folder that names classes, and the names."""
    plain, official = root / _PLAIN_NAMES, root / _OFFICIAL_NAMES
    source = plain if plain.is_file() else official if official.is_file() else None
    if source is None:
        return None, []
    try:
        lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: expected text in UTF-8 ({error})") from None
    if source == plain:
        return source, [line.strip() for line in lines]
    return source, [row.split("\t")[-1].strip() for row in lines[1:]]  # Idx, Ratio, Train, Val, Stuff, Name


class Ade20kImages(Dataset):
    """One split.

    A sample is an image (3, H, W) and its labels (H, W), int64, where `IGNORED` is no label. For training, `transform`
    makes it of a uint8 image; for evaluation the image is in [0, 1] and has its own size.

    A sample of the label maps is read at once, so that maps that contradict the configuration are an error before
    anything is trained.

    Args:
        data: where it lies.
        split: which.
        transform: of image and labels; None for evaluation.

    Attributes:
        classes: names, in the order of the labels.
        counts: pixels of each class in the sample.
    """

    def __init__(self, data: Ade20kDataConfig, split: str, transform: Callable[..., Any] | None = None) -> None:
        self.transform = transform
        self.classes = class_names(data)
        self.format = LabelFormat(data.labels or "ade20k", data.ignore_index, self.classes)
        images, self.maps = (Path(data.root) / kind / split for kind in ("images", "annotations"))
        self.pairs = _pairs(images, self.maps)
        if data.labels is None:
            warnings.warn(
                f"data.labels is not set: {self.maps} is read as {self.format}; "
                "set data.labels to ade20k or, where 0 is the first class, to plain",
                stacklevel=2,
            )
        self.counts = count_labels(self._checked_labels, spread(len(self), SAMPLED_MAPS), self.format, len(self))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        path, labels = self.pairs[index][0], self._labels(index)
        image = decode(path, str(path), frame=labels.shape[::-1])
        self._check_size(index, labels, image.size)
        if self.transform is None:
            return image_tensor(image), torch.from_numpy(labels)
        pixels = tv_tensors.Image(transforms.pil_to_tensor(image))
        return self.transform(pixels, tv_tensors.Mask(torch.from_numpy(labels)))

    def _labels(self, index: int) -> np.ndarray:
        """Labels from 0 on: (H, W), int64."""
        path = self.pairs[index][1]
        return self.format.to_labels(decode_labels(path), str(path))

    def _checked_labels(self, index: int) -> np.ndarray:
        """The same, if the image is of their size; its pixels are not read."""
        labels = self._labels(index)
        self._check_size(index, labels, image_size(self.pairs[index][0], labels.shape[::-1]))
        return labels

    def _check_size(self, index: int, labels: np.ndarray, size: tuple[int, int]) -> None:
        if labels.shape != size[::-1]:
            raise LabelFormatError(
                f"{self.pairs[index][1]}: {labels.shape[1]} x {labels.shape[0]} labels, but the image has "
                f"{size[0]} x {size[1]} pixels"
            )


def _pairs(images: Path, maps: Path) -> list[tuple[Path, Path]]:
    """Each image with its label map; images without one are counted and left out."""
    for folder in (images, maps):
        if not folder.is_dir():
            raise ValueError(f"data.root: expected a folder {folder}, found none")
    try:
        found = sorted(path for path in images.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    except OSError as error:
        raise ValueError(f"data.root: {images}: {error.strerror}") from None
    pairs = [(path, maps / f"{path.stem}.png") for path in found if (maps / f"{path.stem}.png").is_file()]
    lacking = len(found) - len(pairs)
    if not pairs:
        raise ValueError(f"data.root: expected images with label maps in {images} and {maps}, found none")
    if lacking:
        warnings.warn(f"{images}: left out: {lacking} images without a label map in {maps}", stacklevel=3)
    return pairs

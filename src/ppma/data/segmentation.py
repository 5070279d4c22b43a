"""Images with label maps, in the layout of any data set of `LAYOUTS`."""

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as transforms

from ppma.config import require
from ppma.data import ade20k, cityscapes, label_folder, pets
from ppma.data.checked import CheckedData, SampleFacts
from ppma.data.decoding import decode, decode_labels, image_size
from ppma.data.errors import LabelFormatError
from ppma.data.label_maps import IGNORED, LARGEST_VALUE, Convention, LabelFormat, count_labels, spread
from ppma.data.layouts import Layout, Pair, images_in
from ppma.data.preprocessing import image_tensor
from ppma.data.readers import find_split
from ppma.data.source import validation_split

LAYOUTS: dict[str, Layout] = {
    "ade20k": ade20k.LAYOUT,
    "cityscapes": cityscapes.LAYOUT,
    "folder": label_folder.LAYOUT,
    "pets": pets.LAYOUT,
}
MAX_CLASSES = 254  # label maps of one byte also hold 0 (no label) and 255 (ignored)
MAX_SIDE = 16384
SAMPLED_MAPS = 50  # label maps that are read before a run


@dataclass(frozen=True)
class SegmentationDataConfig:
    """Which images with label maps are read, and how they are resized and normalised.

    Attributes:
        root: folder of the data set.
        name: its layout, "ade20k", "cityscapes", "pets" (Oxford-IIIT Pet) or "folder" (`images/`, `labels/` and
            `classes.txt`).
        train_split: training split, None for the layout's.
        val_split: split that selects the best weights, None for the layout's.
        val_fraction: fraction of the training images that a "folder" without validation images uses as validation
            split. The same images at every seed.
        test_split: split on which the best weights are evaluated once, and `ppma eval` by default; None for none.
        classes: names of the classes, None for those of the layout (Cityscapes) or of the folder (classes.txt with a
            name on each line, or ADE20K's objectInfo150.txt).
        labels: convention of the label maps. "ade20k": 0 is ignored and k is class k - 1. "plain": k is class k and 255
            is ignored. "binary": 0 is the first class, 1 and 255 are the second. None: the layout's; where it has none,
            "ade20k" with a warning.
        ignore_index: value that is ignored instead of 255 ("plain") or in addition to 0 ("ade20k").
        short_side: images are resized, keeping their aspect ratio, until the shorter side has this many pixels
        long_side: or the longer side this many, whichever comes first.
        antialias: filter images before they are reduced; OpenCV, and so MMSegmentation, does not.
        mean: subtracted from each channel of images in [0, 1].
        std: divides each channel.
    """

    root: str
    name: str = "ade20k"
    train_split: str | None = None
    val_split: str | None = None
    val_fraction: float = 0.1
    test_split: str | None = None
    classes: tuple[str, ...] | None = None
    labels: Convention | None = None
    ignore_index: int | None = None
    short_side: int = 512
    long_side: int = 2048
    antialias: bool = True
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD

    def __post_init__(self) -> None:
        require(self.name in LAYOUTS, "name", f"one of {', '.join(LAYOUTS)}", self.name)
        require(0 < self.val_fraction < 1, "val_fraction", "a number in (0, 1)", self.val_fraction)
        require(1 <= self.short_side <= self.long_side, "short_side", "1 to long_side", self.short_side)
        require(self.long_side <= MAX_SIDE, "long_side", f"at most {MAX_SIDE}", self.long_side)
        require(all(0 < value < math.inf for value in self.std), "std", "finite numbers > 0", self.std)
        count = None if self.classes is None else len(self.classes)
        require(count is None or 2 <= count <= MAX_CLASSES, "classes", f"2 to {MAX_CLASSES} names", self.classes)
        require(count == len(set(self.classes or ())) or count is None, "classes", "different names", self.classes)
        index = self.ignore_index
        require(index is None or 0 <= index <= LARGEST_VALUE, "ignore_index", f"0 to {LARGEST_VALUE}, or null", index)

    @property
    def layout(self) -> Layout:
        """The layout that `name` selects."""
        return LAYOUTS[self.name]

    def split(self, part: Literal["train", "val"]) -> str:
        """The name of the training or the validation split."""
        return getattr(self, f"{part}_split") or getattr(self.layout, f"{part}_split")

    def scaled(self, height: int, width: int, ratio: float = 1.0) -> tuple[int, int]:
        """The (height, width) that an image is resized to, multiplied by `ratio`."""
        factor = ratio * min(self.long_side / max(height, width), self.short_side / min(height, width))
        return max(1, round(height * factor)), max(1, round(width * factor))


def class_names(data: SegmentationDataConfig) -> tuple[str, ...]:
    """The configured classes, else those of the layout or of the folder."""
    source, named = data.layout.classes(Path(data.root))
    if data.classes is not None:
        if named and len(named) != len(data.classes):
            raise ValueError(f"data.classes: expected {len(named)} names, as {source} has, got {len(data.classes)}")
        return data.classes
    if not named:
        raise ValueError(f"data.classes: expected names, or {source}")
    if not 2 <= len(named) <= MAX_CLASSES:
        raise ValueError(f"data.root: expected 2 to {MAX_CLASSES} classes, found {len(named)} in {source}")
    repeated = [name for name, times in Counter(named).items() if times > 1]
    if repeated:
        raise ValueError(f"{source}: expected different names, found {repeated[0]!r} more than once")
    return named


def open_pairs(data: SegmentationDataConfig, split: str) -> list[Pair]:
    """Each image of a split with its label map."""
    layout, root = data.layout, Path(data.root)
    train, val = data.split("train"), data.split("val")
    images = root / (layout.split_folder or "")
    if layout.split_folder is None or split not in (train, val) or find_split(str(images), val):
        return layout.pairs(root, split)
    if find_split(str(images), train) is None:
        if not images_in(images):
            raise ValueError(f"data.root: expected images in {images}, or a folder {train!r} in it, found neither")
        train = ""
    pairs, missing = layout.pairs(root, train), f"no folder {val!r} in {images}"
    same = [0] * len(pairs)
    chosen = validation_split(same, data.val_fraction, missing, validation=split == val, kind="random")
    return [pairs[index] for index in chosen]


class SegmentationImages(CheckedData):
    """One split of a data set.

    A sample is an image (3, H, W) and its labels (H, W), int64, `IGNORED` where a pixel has no class. Without a
    transform, for evaluation, the image is float32 in [0, 1] and keeps its size.

    The constructor reads a sample of the label maps, so that maps that contradict the configuration are an error before
    training starts.

    Args:
        data: the data set.
        split: name of the split.
        transform: of a uint8 image and its labels, None for evaluation.

    Attributes:
        classes: names in the order of the labels.
        counts: pixels of each class in the sampled label maps.
        maps: folder that holds the label maps.
    """

    unit = "pixels"

    def __init__(self, data: SegmentationDataConfig, split: str, transform: Callable[..., Any] | None = None) -> None:
        self.transform, layout = transform, data.layout
        self.classes = class_names(data)
        convention = data.labels or layout.labels
        self.format = LabelFormat(convention or "ade20k", data.ignore_index, self.classes, layout.hint)
        if convention == "binary" and len(self.classes) != 2:
            raise ValueError(f"data.labels: expected 2 classes with binary, found {len(self.classes)}")
        self.pairs = open_pairs(data, split)
        self.maps = Path(os.path.commonpath([labels.parent for _, labels in self.pairs]))
        if convention is None:
            warnings.warn(
                f"data.labels is not set: {self.maps} is read as {self.format}; "
                "set data.labels to ade20k or, where 0 is the first class, to plain",
                stacklevel=2,
            )
        self.counts = count_labels(self._checked_labels, spread(len(self), SAMPLED_MAPS), self.format, len(self))
        if len(self.classes) == 2 and self.counts.pixels[1] == 0 < self.counts.ignored and self.format.offset == 0:
            warnings.warn(
                f"{self.maps}: no pixel of class {self.classes[1]!r}, but ignored ones ({self.format.ignored[0]}); "
                "for masks of 0 and 255 set data.labels to binary",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, labels = self._read(index)
        if self.transform is None:
            return image_tensor(image), torch.from_numpy(labels)
        pixels = tv_tensors.Image(transforms.pil_to_tensor(image))
        return self.transform(pixels, tv_tensors.Mask(torch.from_numpy(labels)))

    def examine(self, index: int) -> SampleFacts:
        image, labels = self._read(index)
        pixels = np.bincount(labels.ravel(), minlength=IGNORED + 1)
        counts = dict(zip(self.classes, pixels.tolist(), strict=False)) | {"(ignored)": int(pixels[IGNORED])}
        return SampleFacts(image.size, counts)

    def _read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """An image and its labels, (H, W), int64."""
        path, labels = self.pairs[index][0], self._labels(index)
        image = decode(path, str(path), frame=labels.shape[::-1])
        self._check_size(index, labels, image.size)
        return image, labels

    def _labels(self, index: int) -> np.ndarray:
        """The labels of one image, (H, W), int64."""
        path = self.pairs[index][1]
        return self.format.to_labels(decode_labels(path), str(path))

    def _checked_labels(self, index: int) -> np.ndarray:
        """The labels of one image, compared with the size in the image's header."""
        labels = self._labels(index)
        self._check_size(index, labels, image_size(self.pairs[index][0], labels.shape[::-1]))
        return labels

    def _check_size(self, index: int, labels: np.ndarray, size: tuple[int, int]) -> None:
        if labels.shape != size[::-1]:
            raise LabelFormatError(
                f"{self.pairs[index][1]}: {labels.shape[1]} x {labels.shape[0]} labels, but the image has "
                f"{size[0]} x {size[1]} pixels"
            )

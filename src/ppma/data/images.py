"""The images of a classification run, and their transforms."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform

from ppma.config import require
from ppma.data import arrays, cifar, readers
from ppma.data.checked import CheckedData, SampleFacts
from ppma.data.preprocessing import Transform
from ppma.data.shards import TarImages
from ppma.data.source import SPLIT_SEED, ImageSource, Subset, stratified, validation_split


@dataclass(frozen=True)
class ImageDataConfig:
    """A data set of labelled images and its preprocessing.

    Attributes:
        name: a name of `SOURCES`: "digits" (embedded), "folder" (root/train/class/image), "fashion_mnist" (IDX files),
            "cifar10" (its own files), "tar" (archives of class folders), "webdataset" (local shards); or a name of
            timm's dataset factory, such as "torch/cifar100" or "hfds/owner/name".
        root: location of the data.
        train_split: training split.
        val_split: validation split, which selects the best weights.
        val_fraction: fraction of the training images of each class that a "folder" without validation images uses as
            validation split. The same images at every seed.
        test_split: split on which the best weights are evaluated once; None for none.
        train_fraction: fraction of the training images of each class to use.
        image_size: side of the model's square input, in pixels.
        interpolation: resampling filter.
        mean: subtracted from each channel.
        std: each channel is divided by it.
        crop_pct: fraction of the resized image's side that the centre crop of evaluation keeps.
    """

    name: str = "folder"
    root: str | None = None
    train_split: str = "train"
    val_split: str = "val"
    val_fraction: float = 0.1
    test_split: str | None = None
    train_fraction: float = 1.0
    image_size: int = 224
    interpolation: Literal["bicubic", "bilinear", "nearest"] = "bicubic"
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD
    crop_pct: float = 0.875

    def __post_init__(self) -> None:
        require(0 < self.train_fraction <= 1, "train_fraction", "a number in (0, 1]", self.train_fraction)
        require(0 < self.val_fraction < 1, "val_fraction", "a number in (0, 1)", self.val_fraction)
        require(0 < self.crop_pct <= 1, "crop_pct", "a number in (0, 1]", self.crop_pct)
        require(self.image_size >= 8, "image_size", "at least 8", self.image_size)
        require(min(self.std) > 0, "std", "numbers > 0", self.std)
        needs_root = self.name not in ("digits",) and not self.name.startswith("hfds/")
        require(self.root is not None or not needs_root, "root", f"the location of the {self.name!r} data", self.root)


@dataclass(frozen=True)
class AugmentConfig:
    """Data augmentation of training images, by timm.

    Attributes:
        scale: range of the random crop's area, as a fraction of the image.
        ratio: range of the random crop's aspect ratio.
        hflip: probability of a horizontal flip.
        color_jitter: strength of colour jitter; timm ignores it when `auto_augment` is set.
        auto_augment: a policy in timm's notation, such as rand-m9-mstd0.5-inc1.
        erasing: probability of random erasing.
        erasing_mode: fill of the erased area: noise for each pixel, one random colour, or zero.
        mixup: alpha of Mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none.
        mix_prob: probability that a batch is mixed.
        mix_switch: probability of CutMix when both are on.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    erasing: float = 0.0
    erasing_mode: Literal["pixel", "rand", "const"] = "pixel"
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_prob: float = 1.0
    mix_switch: float = 0.5

    def __post_init__(self) -> None:
        for key in ("hflip", "erasing", "mix_prob", "mix_switch"):
            require(0 <= getattr(self, key) <= 1, key, "a probability", getattr(self, key))
        for key in ("scale", "ratio"):
            low, high = getattr(self, key)
            require(0 < low <= high, key, "two ascending numbers > 0", getattr(self, key))
        require(self.scale[1] <= 1, "scale", "fractions of the image's area, at most 1", self.scale)


# Data sets by name: functions of root and split.
SOURCES: dict[str, Callable[[str, str], ImageSource]] = {
    "cifar10": cifar.cifar10_images,
    "digits": lambda root, split: arrays.digits(split),
    "fashion_mnist": lambda root, split: arrays.idx_images(root, split, arrays.FASHION_CLASSES),
    "folder": readers.folder_images,
    "tar": lambda root, split: TarImages(root, split, "folder"),
    "webdataset": lambda root, split: TarImages(root, split, "cls"),
}


def open_images(data: ImageDataConfig, split: str) -> ImageSource:
    """Open the images of one split.

    Raises:
        ValueError: the data are missing or malformed.

    Examples:
        >>> from ppma.data.images import ImageDataConfig, open_images
        >>> len(open_images(ImageDataConfig(name="digits"), "test"))
        359
    """
    if data.name == "folder" and _needs_split(data, split):
        return _split_folder(data, split)
    if data.name in SOURCES:
        return SOURCES[data.name](data.root or "", split)
    return readers.timm_images(data.name, data.root, split)


def _needs_split(data: ImageDataConfig, split: str) -> bool:
    """Whether to take this split from a folder of training images that has no validation folder beside it."""
    root = data.root or ""
    if split not in (data.train_split, data.val_split) or readers.find_split(root, data.val_split):
        return False
    only_classes = Path(root).is_dir() and not readers.find_split(root, data.test_split or "test")
    return only_classes or readers.find_split(root, data.train_split) is not None


def _split_folder(data: ImageDataConfig, split: str) -> ImageSource:
    """The training or validation part of a folder of training images, or of one with class folders alone."""
    root, train_split = data.root or "", data.train_split
    images = readers.folder_images(root, train_split if readers.find_split(root, train_split) else None)
    missing, validation = f"no folder {data.val_split!r} in {root}", split == data.val_split
    return Subset(images, validation_split(images.labels(), data.val_fraction, missing, validation=validation))


def open_training_images(data: ImageDataConfig) -> ImageSource:
    """Open the training split, or the configured fraction of it."""
    source = open_images(data, data.train_split)
    if data.train_fraction == 1:
        return source
    (chosen,) = stratified(source.labels(), [data.train_fraction], SPLIT_SEED)
    return Subset(source, chosen)


def train_transform(data: ImageDataConfig, augment: AugmentConfig) -> Transform:
    """The training transform, from an image to a normalised (3, image_size, image_size) tensor."""
    return create_transform(
        data.image_size,
        is_training=True,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter,
        auto_augment=augment.auto_augment,
        re_prob=augment.erasing,
        re_mode=augment.erasing_mode,
        interpolation=data.interpolation,
        mean=data.mean,
        std=data.std,
    )


class TransformedImages(CheckedData):
    """The (transformed image, label) pairs of a source."""

    unit = "images"

    def __init__(self, source: ImageSource, transform: Transform) -> None:
        self.source, self.transform, self.classes = source, transform, source.classes

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.source[index]
        return self.transform(image), label

    def examine(self, index: int) -> SampleFacts:
        image, label = self.source[index]
        return SampleFacts(image.size, {self.classes[label]: 1})

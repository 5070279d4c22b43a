"""Classifiers as files: weights, and beside them in the same file the classes and how images are prepared."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from timm.data import ImageNetInfo

from ppma import config
from ppma.config import require
from ppma.data.images import ImageDataConfig
from ppma.models import PolylineBackbone, files, load_checkpoint, save_checkpoint

_KEY = files.task_key("classification")
_LARGEST_IMAGE = 16384


@dataclass(frozen=True)
class Preparation:
    """What a classifier needs beside its weights.

    Attributes:
        classes: names, in the order of the scores.
        image_size: as in `ImageDataConfig`, like all that follow.
        interpolation: of resizing.
        mean: of the channels.
        std: of the channels.
        crop_pct: of the centre crop.
    """

    classes: tuple[str, ...]
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
    def of(cls, data: ImageDataConfig, classes: Sequence[str]) -> "Preparation":
        """How a configuration prepares images."""
        shared = {field.name: getattr(data, field.name) for field in dataclasses.fields(cls) if field.name != "classes"}
        return cls(classes=tuple(classes), **shared)

    @classmethod
    def published(cls, model: PolylineBackbone) -> "Preparation":
        """As the published models are prepared, with ImageNet's classes if it has 1,000, else numbers."""
        known = model.pretrained_cfg
        return cls(
            classes=_default_classes(model.num_classes),
            image_size=known["input_size"][-1],
            interpolation=known["interpolation"],
            mean=tuple(known["mean"]),
            std=tuple(known["std"]),
            crop_pct=known["crop_pct"],
        )

    def apply_to(self, data: ImageDataConfig) -> ImageDataConfig:
        """Data prepared this way."""
        changes = {key: value for key, value in dataclasses.asdict(self).items() if key != "classes"}
        return dataclasses.replace(data, **changes)


def save_classifier(model: PolylineBackbone, path: Path, preparation: Preparation) -> None:
    """Write a file that `load_classifier`, and `ppma.load_checkpoint`, read."""
    save_checkpoint(model, path, extra={_KEY: json.dumps(dataclasses.asdict(preparation))})


def _stored(path: str | Path) -> Preparation | None:
    if not files.is_safetensors(path):
        return None
    metadata = files.read_metadata(path)
    if _KEY not in metadata:
        return None
    try:
        return config.build(Preparation, files.json_in(metadata, _KEY, str(path)), source=f"{path}: {_KEY}")
    except config.ConfigError as error:
        raise files.CheckpointError(str(error)) from None


def classes_in(path: str | Path) -> tuple[str, ...] | None:
    """The classes of a file, None if it does not name them."""
    stored = _stored(path)
    return None if stored is None else stored.classes


def load_classifier(path: str | Path) -> tuple[PolylineBackbone, Preparation]:
    """A model, in evaluation mode, and how it wants its images.

    A file that does not say it (the authors' are such) is prepared as the published models are.
    """
    model = load_checkpoint(path)
    if model.num_classes == 0:
        raise files.CheckpointError(f"{path}: expected a classifier, got a backbone without classes")
    preparation = _stored(path) or Preparation.published(model)
    if len(preparation.classes) != model.num_classes:
        raise files.CheckpointError(
            f"{path}: expected the names of {model.num_classes} classes, got {len(preparation.classes)}"
        )
    return model, preparation


def _default_classes(count: int) -> tuple[str, ...]:
    if count == 1000:
        info = ImageNetInfo()
        return tuple(info.index_to_label_name(index) for index in range(count))
    return tuple(map(str, range(count)))

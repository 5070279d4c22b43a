"""Images with instances in COCO's layout: `annotations/instances_SPLIT.json`, images in `SPLIT/`."""

import contextlib
import io
import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision import tv_tensors
from torchvision.datasets import CocoDetection
from torchvision.transforms.v2 import functional as transforms

from ppma.config import require
from ppma.data.pixels import image_tensor
from ppma.data.source import decode
from ppma.engine.task import BrokenSampleError

LEAST_SIDE = 1.0  # pixels of a box; narrower ones are degenerate


@dataclass(frozen=True)
class CocoDataConfig:
    """Where images with instances lie.

    Attributes:
        root: the folder.
        train_split: of training.
        val_split: chooses the best weights.
        classes: names of the categories to use, in this order; None for all, in the order of their ids.
        mean: of the channels of images in [0, 1], subtracted.
        std: of the channels, divided by.
    """

    root: str
    train_split: str = "train2017"
    val_split: str = "val2017"
    classes: tuple[str, ...] | None = None
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD

    def __post_init__(self) -> None:
        named = self.classes
        require(named is None or len(named) == len(set(named)) > 0, "classes", "different names, or null", named)


class CocoInstances(CocoDetection):
    """One split.

    For training, a sample is what `transform` makes of an image and its target: boxes (n, 4), labels (n,) from 1 on,
    masks (n, H, W). Crowd regions and degenerate instances are left out, and images in which nothing is left.
    For evaluation, a sample is the image (3, H, W) in [0, 1] and its annotations as the file has them, crowd regions
    included: what lies in them is neither right nor wrong. Images without any annotation belong to it.

    Args:
        data: where it lies.
        split: which.
        transform: of image and target; None for evaluation.

    Attributes:
        classes: names, in the order of the labels 1, 2, ...
        left_out: how many were left out, by reason.
    """

    ids: list[int]

    def __init__(self, data: CocoDataConfig, split: str, transform: Callable[..., Any] | None = None) -> None:
        self.source = annotation_file(data.root, split)
        images = Path(data.root) / split
        if not images.is_dir():
            raise ValueError(f"data.root: expected the images in {images}, found no such folder")
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints how long it took
                super().__init__(str(images), str(self.source))
        except (ValueError, KeyError, TypeError, AssertionError, AttributeError) as error:
            raise ValueError(f"{self.source}: not an annotation file in COCO's format ({error!r})") from None
        self.train, self.augment = transform is not None, transform
        self.left_out: Counter[str] = Counter()
        self._choose_classes(data.classes)
        self._choose_annotations()
        if not self.ids:
            raise ValueError(f"{self.source}: expected images with instances, found none{self._said()}")
        if self.left_out:
            warnings.warn(f"{self.source}: left out{self._said()}", stacklevel=2)

    def _said(self) -> str:
        return ": " + ", ".join(f"{count} {reason}" for reason, count in self.left_out.items()) if self.left_out else ""

    def _choose_classes(self, wanted: tuple[str, ...] | None) -> None:
        ids = {str(category["name"]): category["id"] for _, category in sorted(self.coco.cats.items())}
        if not ids:
            raise ValueError(f"{self.source}: expected categories, found none")
        unknown = [name for name in wanted or () if name not in ids]
        if unknown:
            raise ValueError(f"data.classes: {', '.join(unknown)} not among the categories of {self.source}")
        self.classes = wanted or tuple(ids)
        self.category_ids = tuple(ids[name] for name in self.classes)
        self.label_of = {category: label for label, category in enumerate(self.category_ids, start=1)}

    def _choose_annotations(self) -> None:
        kept: dict[int, list[dict[str, Any]]] = {image_id: [] for image_id in self.ids}
        for annotation in self.coco.dataset.get("annotations", []):
            category = annotation.get("category_id")
            if category not in self.coco.cats:
                raise ValueError(
                    f"{self.source}: annotation {annotation.get('id')} has category_id {category!r}, which is none of "
                    f"the {len(self.coco.cats)} categories"
                )
            if category not in self.label_of:
                continue
            reason = self._reason_against(annotation)
            if reason is None:
                kept[annotation["image_id"]].append(annotation)
            else:
                self.left_out[reason] += 1
        if self.train:
            self.ids = [image_id for image_id in self.ids if kept[image_id]]
            empty = len(kept) - len(self.ids)
            if empty:
                self.left_out["images without instances"] = empty
        self.kept = kept

    def _reason_against(self, annotation: dict[str, Any]) -> str | None:
        image = self.coco.imgs.get(annotation.get("image_id"))
        if image is None:
            return "instances of unknown images"
        if annotation.get("iscrowd"):
            return "crowd regions" if self.train else None
        if _clipped_box(annotation.get("bbox"), image) is None:
            return "degenerate boxes"
        return None if _has_outline(annotation.get("segmentation")) else "instances without an outline"

    def _read(self, image_id: int) -> Image.Image:
        described = self.coco.imgs[image_id]
        path = Path(self.root) / described["file_name"]
        image = decode(path, str(path))
        if image.size != (described["width"], described["height"]):
            raise BrokenSampleError(
                f"{path}: {image.width} x {image.height} pixels, but the annotations are for "
                f"{described['width']} x {described['height']}"
            )
        return image

    def __getitem__(self, index: int) -> Any:
        image_id = self.ids[index]
        image = self._read(image_id)
        if self.augment is None:
            truth = {"image_id": image_id, "annotations": self.kept[image_id], "category_ids": self.category_ids}
            return image_tensor(image), truth
        return self.augment(tv_tensors.Image(transforms.pil_to_tensor(image)), self._target(image_id, image))

    def _target(self, image_id: int, image: Image.Image) -> dict[str, Any]:
        annotations = self.kept[image_id]
        boxes = [_clipped_box(one["bbox"], self.coco.imgs[image_id]) for one in annotations]
        try:
            masks = np.stack([self.coco.annToMask(one) for one in annotations])
        except Exception as error:  # the decoder raises bare exceptions of several kinds
            raise BrokenSampleError(f"{self.source}: image {image_id}: outline cannot be read ({error!r})") from None
        canvas = (image.height, image.width)
        return {
            "boxes": tv_tensors.BoundingBoxes(torch.tensor(boxes), format="XYXY", canvas_size=canvas),
            "labels": torch.tensor([self.label_of[one["category_id"]] for one in annotations]),
            "masks": tv_tensors.Mask(torch.from_numpy(masks)),
        }


def annotation_file(root: str, split: str) -> Path:
    """The annotations of a split; a ValueError says where they were looked for."""
    path = Path(root) / "annotations" / f"instances_{split}.json"
    if not path.is_file():
        raise ValueError(f"data.root: expected the annotations in {path}, found none")
    return path


def _clipped_box(box: Any, image: dict[str, Any]) -> list[float] | None:
    """Left, top, right, bottom inside the image; None if nothing worth a box is left."""
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(x, int | float) for x in box):
        return None
    left, top, width, height = map(float, box)
    if not all(map(math.isfinite, (left, top, width, height))):
        return None
    clipped = [max(left, 0.0), max(top, 0.0), min(left + width, image["width"]), min(top + height, image["height"])]
    wide = clipped[2] - clipped[0] >= LEAST_SIDE and clipped[3] - clipped[1] >= LEAST_SIDE
    return clipped if wide else None


def _has_outline(segmentation: Any) -> bool:
    """Whether there is a run-length code or a polygon of three points."""
    if isinstance(segmentation, dict):
        return bool(segmentation.get("counts"))
    return isinstance(segmentation, list) and any(
        isinstance(polygon, list) and len(polygon) >= 6 for polygon in segmentation
    )

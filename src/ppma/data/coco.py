"""Instance annotations in COCO's layout: `annotations/instances_SPLIT.json`, images in `SPLIT/`."""

import dataclasses
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
from torchvision.transforms.v2 import functional as transforms

from ppma.config import require
from ppma.data.checked import CheckedData, SampleFacts
from ppma.data.coco_file import (
    CocoFile,
    Id,
    ImageEntry,
    clipped_box,
    is_box,
    is_id,
    is_number,
    is_polygon,
    outline_mask,
    read_coco,
    run_lengths,
    shown,
)
from ppma.data.decoding import decode
from ppma.data.errors import BrokenSampleError
from ppma.data.preprocessing import image_tensor
from ppma.data.source import validation_split

_NO_OUTLINE, _EMPTY = "instances without an outline", "images without instances"


@dataclass(frozen=True)
class CocoDataConfig:
    """A data set in COCO's layout.

    Attributes:
        root: folder of the data set.
        train_split: split to train on.
        val_split: split that selects the best weights.
        val_fraction: fraction of the training images to validate on if there are no annotations of `val_split`. The
            same images at every seed.
        test_split: split on which the best weights are evaluated once, and `ppma eval` by default; None for none.
        classes: names of the categories to use, in this order; None for all of them, ordered by id.
        mean: channel means of images in [0, 1].
        std: channel standard deviations of images in [0, 1].
    """

    root: str
    train_split: str = "train2017"
    val_split: str = "val2017"
    val_fraction: float = 0.1
    test_split: str | None = None
    classes: tuple[str, ...] | None = None
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD

    def __post_init__(self) -> None:
        named = self.classes
        require(named is None or len(named) == len(set(named)) > 0, "classes", "different names, or null", named)
        require(0 < self.val_fraction < 1, "val_fraction", "a number in (0, 1)", self.val_fraction)
        require(min(self.std) > 0, "std", "numbers > 0", self.std)


class CocoInstances(CheckedData):
    """One split of a data set.

    A training sample is `transform(image, target)`, where the target has boxes (n, 4), labels (n,) from 1 and, unless
    the split is read without them, masks (n, H, W). Crowd regions and degenerate instances are skipped, as are images
    without any other instance.
    An evaluation sample is an image (3, H, W) in [0, 1] and its annotations from the file. They include crowd regions,
    in which detections are ignored; images without annotations are evaluated too.

    Args:
        data: the data set.
        split: name of the split.
        transform: transform of image and target for training; None for evaluation.
        masks: read the outlines of instances, and skip instances without one; None reads them if any instance has one.

    Attributes:
        classes: class names, in the order of the labels 1, 2, ...
        left_out: number of skipped entries by reason.
        masks: whether outlines are read.
    """

    unit = "instances"

    def __init__(
        self,
        data: CocoDataConfig,
        split: str,
        transform: Callable[..., Any] | None = None,
        *,
        masks: bool | None = True,
    ) -> None:
        split_off = _is_split_off(data, split)
        whole = data.train_split if split_off else split
        self.source = annotation_file(data.root, whole)
        self.folder = Path(data.root) / whole
        if not self.folder.is_dir():
            raise ValueError(f"data.root: expected images in {self.folder}, found no such folder")
        contents = read_coco(self.source)
        if split_off:
            contents = _part(contents, data, validation=split == data.val_split)
        self.images = contents.images
        self.train, self.augment = transform is not None, transform
        self.left_out: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self.masks = any(one.get("segmentation") for one in contents.annotations) if masks is None else masks
        if masks is None and not self.masks:
            warnings.warn(f"{self.source}: no outlines: the detector predicts boxes only", stacklevel=2)
        self._choose_classes(contents.categories, data.classes)
        self._choose_annotations(contents)
        if self.left_out:
            warnings.warn(f"{self.source}: left out{self._summary()}", stacklevel=2)

    def _leave_out(self, reason: str, entry: str, count: int = 1) -> None:
        self.left_out[reason] += count
        self._first.setdefault(reason, entry)

    def _summary(self) -> str:
        parts = [f"{count} {reason} (first: {self._first[reason]})" for reason, count in self.left_out.items()]
        return ": " + ", ".join(parts) if parts else ""

    def _choose_classes(self, categories: dict[Id, str], wanted: tuple[str, ...] | None) -> None:
        ids = {name: identity for identity, name in categories.items()}
        unknown = [name for name in wanted or () if name not in ids]
        if unknown:
            raise ValueError(f"data.classes: expected categories of {self.source}, got {', '.join(unknown)}")
        self.classes = wanted or tuple(ids)
        self.category_ids = tuple(ids[name] for name in self.classes)
        self.label_of = {category: label for label, category in enumerate(self.category_ids, start=1)}

    def _choose_annotations(self, contents: CocoFile) -> None:
        self.kept: dict[Id, list[dict[str, Any]]] = {image_id: [] for image_id in self.images}
        for number, annotation in enumerate(contents.annotations):
            entry = f"annotation {shown(annotation['id'])}" if "id" in annotation else f"annotations[{number}]"
            category = annotation.get("category_id")
            if not is_id(category) or category not in contents.categories:
                raise ValueError(
                    f"{self.source}: {entry} has category_id {shown(category)}, which is none of "
                    f"the {len(contents.categories)} categories"
                )
            if category in self.label_of:
                self._choose(annotation, entry)
        self.ids = list(self.images)
        if self.train:
            self.ids = [image_id for image_id in self.ids if self.kept[image_id]]
            empty = [image for image_id, image in self.images.items() if not self.kept[image_id]]
            if empty:
                self._leave_out(_EMPTY, empty[0].file_name, len(empty))
        if not any(not one["iscrowd"] for kept in self.kept.values() for one in kept):
            hint = "; Mask R-CNN needs 'segmentation' beside every 'bbox', detector.masks=false does not"
            hint = hint if self.left_out[_NO_OUTLINE] else ""
            raise ValueError(f"{self.source}: expected images with instances, found none{self._summary()}{hint}")

    def _choose(self, annotation: dict[str, Any], entry: str) -> None:
        """Keep the used fields of a valid annotation, or count why it is skipped."""
        image_id, crowd, box, area = (annotation.get(key) for key in ("image_id", "iscrowd", "bbox", "area"))
        if crowd not in (None, 0, 1):
            raise ValueError(f"{self.source}: {entry}: expected 0 or 1 as 'iscrowd', got {shown(crowd)}")
        if not is_id(image_id) or image_id not in self.images:
            return self._leave_out("instances of unknown images", entry)
        image = self.images[image_id]
        if crowd and self.train:
            return self._leave_out("crowd regions", entry)
        if not is_box(box) or clipped_box(box, image) is None:
            return self._leave_out("degenerate boxes", entry)
        kept = self.kept[image_id]
        if self.masks:
            outline = self._outline(annotation.get("segmentation"), image, entry)
            if outline is None:
                return self._leave_out(_NO_OUTLINE, entry)
        kept.append(
            {
                "entry": entry,
                "image_id": image_id,
                "category_id": annotation["category_id"],
                "iscrowd": int(bool(crowd)),
                "bbox": box,
                "area": area if is_number(area) and area >= 0 else box[2] * box[3],
            }
            | ({"segmentation": outline} if self.masks else {})
        )
        return None

    def _outline(self, outline: Any, image: ImageEntry, entry: str) -> list[Any] | dict[str, Any] | None:
        """The valid polygons of a segmentation, or its run-length code; None if there is neither."""
        if isinstance(outline, dict):
            if outline.get("size") != [image.height, image.width]:
                raise ValueError(
                    f"{self.source}: {entry}: expected run lengths of the image's size [{image.height}, {image.width}]"
                    f", got {repr(outline.get('size'))[:40]}"
                )
            return outline if outline.get("counts") else None
        if not isinstance(outline, list):
            return None
        polygons = [polygon for polygon in outline if is_polygon(polygon, image)]
        if polygons and len(polygons) < len(outline):
            self._leave_out("parts of outlines that are no polygons", entry, len(outline) - len(polygons))
        return polygons or None

    def __len__(self) -> int:
        return len(self.ids)

    def _read(self, image: ImageEntry) -> Image.Image:
        path = self.folder / image.file_name
        frame = (image.width, image.height)
        picture = decode(path, str(path), frame=frame)
        if picture.size != frame:
            raise BrokenSampleError(
                f"{path}: {picture.width} x {picture.height} pixels, but the annotations are for "
                f"{image.width} x {image.height}"
            )
        return picture

    def __getitem__(self, index: int) -> Any:
        image_id = self.ids[index]
        picture = self._read(self.images[image_id])
        if self.augment is not None:
            return self.augment(tv_tensors.Image(transforms.pil_to_tensor(picture)), self._target(image_id))
        for one in self.kept[image_id]:
            if isinstance(one.get("segmentation"), dict):
                self._checked(one, run_lengths, one["segmentation"]["counts"], picture.width * picture.height)
        return image_tensor(picture), {
            "image_id": image_id,
            "annotations": self.kept[image_id],
            "category_ids": self.category_ids,
        }

    def examine(self, index: int) -> SampleFacts:
        image_id = self.ids[index]
        picture = self._read(self.images[image_id])
        for one in self.kept[image_id]:
            self._checked(one, outline_mask, one["segmentation"], picture.height, picture.width)
        counted = [one for one in self.kept[image_id] if not one["iscrowd"]]
        names = (self.classes[self.label_of[one["category_id"]] - 1] for one in counted)
        return SampleFacts(picture.size, Counter(names))

    def _target(self, image_id: Id) -> dict[str, Any]:
        annotations, image = self.kept[image_id], self.images[image_id]
        boxes = [clipped_box(one["bbox"], image) for one in annotations]
        target = {
            "boxes": tv_tensors.BoundingBoxes(
                torch.tensor(boxes), format="XYXY", canvas_size=(image.height, image.width)
            ),
            "labels": torch.tensor([self.label_of[one["category_id"]] for one in annotations]),
        }
        if self.masks:
            masks = [
                self._checked(one, outline_mask, one["segmentation"], image.height, image.width) for one in annotations
            ]
            target["masks"] = tv_tensors.Mask(torch.from_numpy(np.stack(masks)))
        return target

    def _checked(self, annotation: dict[str, Any], read: Callable[..., Any], *arguments: Any) -> Any:
        """Call `read`; an error names the annotation."""
        try:
            return read(*arguments)
        except ValueError as error:
            raise BrokenSampleError(f"{self.source}: {annotation['entry']}: {error}") from None


def _is_split_off(data: CocoDataConfig, split: str) -> bool:
    """Whether the validation images are a part of the training images, and `split` is one of the two."""
    given = [_annotation_path(data.root, name).is_file() for name in (data.train_split, data.val_split)]
    return split in (data.train_split, data.val_split) and given == [True, False]


def _part(contents: CocoFile, data: CocoDataConfig, *, validation: bool) -> CocoFile:
    """The training or validation part of an annotation file."""
    ids, missing = list(contents.images), f"no {_annotation_path(data.root, data.val_split)}"
    same = [0] * len(ids)
    chosen = validation_split(same, data.val_fraction, missing, validation=validation, kind="random")
    images = {ids[index]: contents.images[ids[index]] for index in chosen}
    others = contents.images.keys() - images.keys()

    def belongs(annotation: dict[str, Any]) -> bool:
        image_id = annotation.get("image_id")
        return not is_id(image_id) or image_id not in others

    return dataclasses.replace(contents, images=images, annotations=list(filter(belongs, contents.annotations)))


def _annotation_path(root: str, split: str) -> Path:
    return Path(root) / "annotations" / f"instances_{split}.json"


def annotation_file(root: str, split: str) -> Path:
    """The annotation file of a split; raises ValueError if there is none."""
    path = _annotation_path(root, split)
    if not path.is_file():
        raise ValueError(f"data.root: expected annotations in {path}, found none")
    return path

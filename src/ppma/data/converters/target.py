"""The folder that a conversion writes: COCO annotations and label maps."""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as rle

from ppma.data.decoding import image_size
from ppma.progress import track

COCO_SPLITS = {"train": "train2017", "val": "val2017", "test": "test2017"}
CLASSES_FILE = "classes.txt"


@dataclass(frozen=True)
class Instance:
    """An object in an image.

    Attributes:
        label: index of its class.
        box: left, top, width, height in pixels.
        polygons: outline, each a list x, y, x, y, ... in pixels.
        mask: (H, W), bool, in place of polygons.
        crowd: ignored in training and evaluation.
    """

    label: int
    box: tuple[float, float, float, float]
    polygons: Sequence[Sequence[float]] = ()
    mask: np.ndarray | None = None
    crowd: bool = False

    def to_coco(self, height: int, width: int) -> dict[str, Any]:
        """The fields of a COCO annotation."""
        fields = {"category_id": self.label + 1, "bbox": list(self.box), "iscrowd": int(self.crowd)}
        if self.mask is not None:
            encoded = rle.encode(np.asfortranarray(self.mask.astype(np.uint8)))
            outline = {"size": encoded["size"], "counts": encoded["counts"].decode()}
            return {**fields, "area": int(self.mask.sum()), "segmentation": outline}
        if self.polygons:
            merged = rle.merge(rle.frPyObjects([list(polygon) for polygon in self.polygons], height, width))
            return {**fields, "area": int(rle.area(merged)), "segmentation": [list(one) for one in self.polygons]}
        return {**fields, "area": self.box[2] * self.box[3]}


class Target:
    """A new folder, filled beside its final place and moved there at the end, so that an error leaves nothing.

    Args:
        dest: a new or empty folder.
        link: make symbolic links to images instead of copies.

    Attributes:
        lines: what was written, for the user.
    """

    def __init__(self, dest: Path, *, link: bool = False) -> None:
        if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
            raise ValueError(f"dest: expected a new or empty folder, got {dest}")
        if not dest.absolute().parent.is_dir():
            raise ValueError(f"dest: expected a folder at {dest.absolute().parent}, found none")
        self.dest, self.link = dest, link
        self.lines: list[str] = []
        self._copies: dict[Path, Path] = {}

    def __enter__(self) -> "Target":
        self.folder = Path(tempfile.mkdtemp(prefix=f".{self.dest.name}-", dir=self.dest.absolute().parent))
        self.folder.chmod(0o777 & ~_umask())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            if self.dest.exists():
                self.dest.rmdir()
            os.replace(self.folder, self.dest)
        else:
            shutil.rmtree(self.folder)

    def add_instances(
        self, split: str, classes: Sequence[str], samples: Collection[tuple[Path, Iterable[Instance]]]
    ) -> None:
        """Write the COCO file of a split, and its images.

        Args:
            split: "train", "val" or "test".
            classes: class names; the ids of the categories count from 1.
            samples: images and their instances.
        """
        _check_names(classes)
        name = COCO_SPLITS[split]
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number, (path, instances) in enumerate(track(samples, f"{split} instances"), start=1):
            width, height = image_size(path, (0, 0))
            self._place(path, self.folder / name / path.name)
            images.append({"id": number, "file_name": path.name, "width": width, "height": height})
            for instance in instances:
                if instance.mask is not None and instance.mask.shape != (height, width):
                    rows, columns = instance.mask.shape
                    raise ValueError(
                        f"{path}: {width} x {height} pixels, but the mask of an instance has {columns} x {rows}"
                    )
                fields = {"id": len(annotations) + 1, "image_id": number, **instance.to_coco(height, width)}
                annotations.append(fields)
        categories = [{"id": label, "name": name} for label, name in enumerate(classes, start=1)]
        contents = {"images": images, "annotations": annotations, "categories": categories}
        target = self.folder / "annotations" / f"instances_{name}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(contents), encoding="utf-8")
        bare = sum("segmentation" not in one for one in annotations)
        note = f"; {bare} have a box only, Mask R-CNN also needs outlines" if bare else ""
        self.lines.append(f"{name}: {len(images)} images, {len(annotations)} instances of {len(classes)} classes{note}")

    def add_labels(
        self, split: str, classes: Sequence[str], samples: Collection[tuple[Path, str]], labels: Iterable[np.ndarray]
    ) -> None:
        """Write label maps of a split, and its images.

        Args:
            split: "train", "val" or "test".
            classes: class names.
            samples: images, and their names without suffix.
            labels: (H, W) for each image: class indices, 255 for ignored pixels.
        """
        _check_names(classes)
        for (path, name), values in zip(track(samples, f"{split} label maps"), labels, strict=True):
            width, height = image_size(path, values.shape[::-1])
            if values.shape != (height, width):
                raise ValueError(
                    f"{path}: {width} x {height} pixels, but its label map has {values.shape[1]} x {values.shape[0]}"
                )
            self._place(path, self.folder / "images" / split / f"{name}{path.suffix}")
            target = self.folder / "labels" / split / f"{name}.png"
            if target.exists():
                raise ValueError(f"{path}: another image of the {split} split has the name {name!r}")
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.astype(np.uint8)).save(target)
        (self.folder / CLASSES_FILE).write_text("\n".join(classes) + "\n", encoding="utf-8")
        self.lines.append(f"labels/{split}: {len(samples)} label maps of {len(classes)} classes")

    def _place(self, image: Path, target: Path) -> None:
        """Copy or link an image; a second copy is a hard link to the first."""
        if target.exists() or target.is_symlink():
            raise ValueError(f"{image}: another image of the same split has the name {target.name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.link:
            target.symlink_to(image.resolve())
            return
        try:
            os.link(self._copies[image], target)
        except (KeyError, OSError):  # the first copy, or a file system without links
            self._copies[image] = Path(shutil.copyfile(image, target))


def _check_names(classes: Sequence[str]) -> None:
    repeated = [name for name, times in Counter(classes).items() if times > 1]
    if repeated or not classes:
        found = f"{repeated[0]!r} more than once" if repeated else "none"
        raise ValueError(f"source: expected different class names, found {found}")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current

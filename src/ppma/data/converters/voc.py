"""Pascal VOC's layout: `JPEGImages`, `Annotations/NAME.xml`, `SegmentationClass/` and `SegmentationObject/NAME.png`."""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ppma.data.converters.target import COCO_SPLITS, Instance, Target
from ppma.data.decoding import IMAGE_SUFFIXES, decode_labels, image_size
from ppma.data.label_maps import IGNORED, LabelFormat
from ppma.data.layouts import read_names

# fmt: off
CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on
_BOXES, _MAPS, _OBJECTS = "Annotations", "SegmentationClass", "SegmentationObject"


@dataclass(frozen=True)
class _Object:
    name: str
    box: tuple[float, float, float, float]
    difficult: bool


def convert(source: Path, target: Target) -> None:
    """Add the boxes of `Annotations`, with the masks of `SegmentationObject`, and the maps of `SegmentationClass`.

    Objects marked difficult become crowd regions, which neither training nor evaluation counts.
    """
    if not (source / _BOXES).is_dir() and not (source / _MAPS).is_dir():
        raise ValueError(f"source: expected a folder {_BOXES} or {_MAPS} in {source}, found neither")
    if (source / _BOXES).is_dir():
        _convert_boxes(source, target)
    if (source / _MAPS).is_dir():
        _convert_maps(source, target)


def _convert_boxes(source: Path, target: Target) -> None:
    splits = _splits(source, "Main", _BOXES, ".xml")
    if (source / _OBJECTS).is_dir():  # boxes without masks would be false positives when masks are evaluated
        masked = {path.stem for path in (source / _OBJECTS).glob("*.png")}
        kept = {split: [name for name in names if name in masked] for split, names in splits.items()}
        dropped = sum(map(len, splits.values())) - sum(map(len, kept.values()))
        if dropped:
            target.lines.append(f"{dropped} images without a map in {_OBJECTS}: left out of the instances")
        splits = {split: names for split, names in kept.items() if names}
    found = {split: [_read_boxes(source, name) for name in names] for split, names in splits.items()}
    named = {one.name for samples in found.values() for _, objects in samples for one in objects}
    classes = CLASSES if named <= set(CLASSES) else tuple(sorted(named))
    for split, samples in found.items():
        target.add_instances(
            split, classes, [(image, _instances(source, image.stem, objects, classes)) for image, objects in samples]
        )


def _convert_maps(source: Path, target: Target) -> None:
    names_file = source / "classes.txt"
    classes = tuple(read_names(names_file)) if names_file.is_file() else ("background", *CLASSES)
    labels = LabelFormat("plain", IGNORED, classes, "classes.txt names the classes of other data than Pascal VOC's")
    for split, names in _splits(source, "Segmentation", _MAPS, ".png").items():
        paths = [source / _MAPS / f"{name}.png" for name in names]
        maps = (labels.to_labels(decode_labels(path), str(path)) for path in paths)
        target.add_labels(split, classes, [(_image(source, name), name) for name in names], maps)


def _splits(source: Path, kind: str, folder: str, suffix: str) -> dict[str, list[str]]:
    """The names of each split: the lists in `ImageSets`, or all files of a folder as training split."""
    lists = {split: source / "ImageSets" / kind / f"{split}.txt" for split in COCO_SPLITS}
    splits = {split: [line.split()[0] for line in read_names(path)] for split, path in lists.items() if path.is_file()}
    # The annotations of a test split are often not distributed.
    splits = {
        split: names for split, names in splits.items() if split != "test" or _has_all(source / folder, names, suffix)
    }
    return splits or {"train": sorted(path.stem for path in (source / folder).glob(f"*{suffix}"))}


def _has_all(folder: Path, names: list[str], suffix: str) -> bool:
    return all((folder / f"{name}{suffix}").is_file() for name in names)


def _image(source: Path, name: str) -> Path:
    tried = [source / "JPEGImages" / f"{name}{suffix}" for suffix in IMAGE_SUFFIXES]
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise ValueError(f"source: expected an image {tried[0]}, found none")
    return found


def _read_boxes(source: Path, name: str) -> tuple[Path, list[_Object]]:
    path, image = source / _BOXES / f"{name}.xml", _image(source, name)
    try:
        root = ElementTree.parse(path).getroot()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ElementTree.ParseError as error:
        raise ValueError(f"{path}: expected XML ({error})") from None
    width, height = image_size(image, (0, 0))
    if root.find("size") is not None:
        given = tuple(_number(root, f"size/{side}", str(path)) for side in ("width", "height"))
        if any(given) and given != (width, height):
            raise ValueError(
                f"{path}: expected the size of the image, {width} x {height}, got {given[0]:g} x {given[1]:g}"
            )
    objects = [
        _object(element, f"{path}: object {number}", width, height)
        for number, element in enumerate(root.findall("object"), start=1)
    ]
    return image, objects


def _object(element: ElementTree.Element, where: str, width: int, height: int) -> _Object:
    name = (element.findtext("name") or "").strip()
    if not name:
        raise ValueError(f"{where}: expected a name, found none")
    left, top, right, bottom = (_number(element, f"bndbox/{key}", where) for key in ("xmin", "ymin", "xmax", "ymax"))
    # Pixels count from 1, and the last one belongs to the box.
    left, top, right, bottom = max(0.0, left - 1), max(0.0, top - 1), min(right, width), min(bottom, height)
    if left >= right or top >= bottom:
        raise ValueError(f"{where}: expected a box inside the image of {width} x {height} pixels")
    difficult = (element.findtext("difficult") or "0").strip() == "1"
    return _Object(name, (left, top, right - left, bottom - top), difficult)


def _number(element: ElementTree.Element, key: str, where: str) -> float:
    text = element.findtext(key)
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a number as {key}, got {text!r}")
    return number


def _instances(source: Path, name: str, objects: list[_Object], classes: tuple[str, ...]) -> Iterator[Instance]:
    """Instances with the masks of the object map, whose value k is the k-th object of the XML file."""
    path = source / _OBJECTS / f"{name}.png"
    values = decode_labels(path) if path.is_file() else np.empty(0)
    for number, one in enumerate(objects, start=1):
        mask = values == number
        yield Instance(classes.index(one.name), one.box, mask=mask if mask.any() else None, crowd=one.difficult)

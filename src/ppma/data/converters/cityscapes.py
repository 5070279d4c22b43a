"""Cityscapes as distributed: `labelIds` files, which hold 34 ids, and `instanceIds` files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ppma.data.cityscapes import CLASSES
from ppma.data.converters.target import Instance, Target
from ppma.data.decoding import decode_labels
from ppma.data.label_maps import IGNORED

# The ids of the classes of the evaluation, in the order of `CLASSES`.
_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_LARGEST_ID = 33
_LICENCE_PLATE = 255  # -1 in one byte
THINGS = CLASSES[CLASSES.index("person") :]
_THING_IDS = _IDS[-len(THINGS) :]
_IMAGE, _LABELS, _INSTANCES = "_leftImg8bit", "_gtFine_labelIds.png", "_gtFine_instanceIds.png"


def convert(source: Path, target: Target) -> None:
    """Add the label maps of the 19 classes, and the instances of the 8 that have them."""
    for split in ("train", "val"):
        images = sorted((source / "leftImg8bit" / split).glob(f"*/*{_IMAGE}.png"))
        if not images:
            continue
        stems = {image: image.stem.removesuffix(_IMAGE) for image in images}
        folders = {image: source / "gtFine" / split / image.parent.name for image in images}
        maps = [folders[image] / f"{stem}{_LABELS}" for image, stem in stems.items()]
        missing = next((path for path in maps if not path.is_file()), None)
        if missing:
            raise ValueError(f"source: expected a label map {missing}, found none")
        target.add_labels(split, CLASSES, list(stems.items()), map(_train_ids, maps))
        objects = {image: folders[image] / f"{stem}{_INSTANCES}" for image, stem in stems.items()}
        given = [path.is_file() for path in objects.values()]
        if all(given):
            target.add_instances(split, THINGS, [(image, _instances(path)) for image, path in objects.items()])
        elif any(given):
            first = list(objects.values())[given.index(False)]
            raise ValueError(f"source: expected an instance map {first}, as for other images, found none")


def _train_ids(path: Path) -> np.ndarray:
    """The classes of a `labelIds` map, (H, W), uint8."""
    table = np.full(256, IGNORED, np.uint8)
    table[list(_IDS)] = np.arange(len(_IDS))
    values = decode_labels(path)
    wrong = values[(values > _LARGEST_ID) & (values != _LICENCE_PLATE)]
    if wrong.size:
        raise ValueError(f"{path}: expected ids from 0 to {_LARGEST_ID}, got {wrong[0]}")
    return table[values]


def _instances(path: Path) -> Iterator[Instance]:
    """The instances of a map: 1000 id + number for an object, the id alone for a group, which becomes a crowd."""
    values = decode_labels(path)
    for value in np.unique(values).tolist():
        identity = value // 1000 if value >= 1000 else value
        if identity not in _THING_IDS:
            continue
        mask = values == value
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        left, top = int(columns[0]), int(rows[0])
        box = (left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1)
        yield Instance(_THING_IDS.index(identity), box, mask=mask, crowd=value < 1000)

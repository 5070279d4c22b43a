"""Annotation files in COCO's format: read, and checked entry by entry."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from pycocotools import mask as rle

LEAST_SIDE = 1.0  # pixels of a box; narrower ones are degenerate
_MOST_BITS = 35  # of one number in a compressed run-length code

Id = int | str


class ImageEntry(NamedTuple):
    """An image as the file describes it."""

    file_name: str
    width: int
    height: int


@dataclass(frozen=True)
class CocoFile:
    """What an annotation file holds.

    Attributes:
        path: of the file.
        images: by id, in the order of the ids.
        categories: names by id, in the order of the ids.
        annotations: objects, not yet looked into.
    """

    path: Path
    images: dict[Id, ImageEntry]
    categories: dict[Id, str]
    annotations: list[dict[str, Any]]


def read_coco(path: Path) -> CocoFile:
    """Read a file; a ValueError names the first entry that is not COCO's format."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{path}: expected an object with images, categories, annotations, got {shown(contents)}")
    images: dict[Id, ImageEntry] = {}
    for number, entry in enumerate(_entries(contents, "images", path)):
        where = f"{path}: images[{number}]"
        images[_new_id(entry, images, where)] = ImageEntry(
            _text(entry, "file_name", where), _side(entry, "width", where), _side(entry, "height", where)
        )
    return CocoFile(path, _by_id(images, path), _categories(contents, path), _entries(contents, "annotations", path))


def _categories(contents: dict[str, Any], path: Path) -> dict[Id, str]:
    categories: dict[Id, str] = {}
    named: dict[str, Id] = {}
    for number, entry in enumerate(_entries(contents, "categories", path)):
        where = f"{path}: categories[{number}]"
        identity, name = _new_id(entry, categories, where), _text(entry, "name", where)
        if name in named:
            raise ValueError(f"{where}: the name {name!r} is taken by the category with id {named[name]!r}")
        categories[identity], named[name] = name, identity
    if not categories:
        raise ValueError(f"{path}: expected categories, found none")
    return _by_id(categories, path)


def shown(value: Any) -> str:
    """A value of a JSON file in a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _came(entry: dict[str, Any], key: str) -> str:
    return f"got {shown(entry[key])}" if key in entry else "found none"


def _entries(contents: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    entries = contents.get(key)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list {key!r}, {_came(contents, key)}")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: {key}[{number}]: expected an object, got {shown(entry)}")
    return entries


def is_id(value: Any) -> TypeGuard[Id]:
    """Whether a value can be an id: a whole number, or text."""
    return isinstance(value, int | str) and not isinstance(value, bool)


def _new_id(entry: dict[str, Any], taken: dict[Id, Any], where: str) -> Id:
    identity = entry.get("id")
    if not is_id(identity):
        raise ValueError(f"{where}: expected a whole number or text as 'id', got {shown(identity)}")
    if identity in taken:
        raise ValueError(f"{where}: the id {shown(identity)} is taken by an earlier entry")
    return identity


def _by_id(entries: dict[Id, Any], path: Path) -> dict[Id, Any]:
    if len(set(map(type, entries))) > 1:
        raise ValueError(f"{path}: expected ids that are all numbers or all text, found both")
    return dict(sorted(entries.items()))


def _text(entry: dict[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # a class called 7
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"{where}: expected text as {key!r}, {f'got {shown(value)}' if key in entry else 'found none'}"
        )
    return value


def _side(entry: dict[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if not is_number(value) or value < 1 or value != int(value):
        raise ValueError(f"{where}: expected a whole number of pixels as {key!r}, {_came(entry, key)}")
    return int(value)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number of a size that coordinates can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9  # false for NaN


def is_box(box: Any) -> TypeGuard[list[float]]:
    """Whether it is four numbers."""
    return isinstance(box, list) and len(box) == 4 and all(map(is_number, box))


def clipped_box(box: list[float], image: ImageEntry) -> list[float] | None:
    """Left, top, right, bottom inside the image of left, top, width, height; None if nothing worth a box is left."""
    left, top, width, height = map(float, box)
    clipped = [max(left, 0.0), max(top, 0.0), min(left + width, image.width), min(top + height, image.height)]
    wide = clipped[2] - clipped[0] >= LEAST_SIDE and clipped[3] - clipped[1] >= LEAST_SIDE
    return clipped if wide else None


def is_polygon(polygon: Any, image: ImageEntry) -> bool:
    """Whether it is three points or more, none further from the image than the image is large.

    pycocotools walks along every pixel of an edge: one of 1e8 pixels takes it a minute, and NaN all memory.
    """
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        return False
    if not set(map(type, polygon)) <= {int, float}:
        return False
    side = max(image.width, image.height)
    # Minimum and maximum pass over NaN, the sum does not.
    return -side <= min(polygon) and max(polygon) <= 2 * side and math.isfinite(sum(polygon))


def outline_mask(outline: Any, height: int, width: int) -> np.ndarray:
    """Polygons or a run-length code as (height, width), uint8 of 0 and 1; a ValueError says what is wrong with a code.

    Run-length codes are decoded here: pycocotools computes areas and overlaps of damaged ones without complaint.
    """
    if isinstance(outline, list):
        return rle.decode(rle.merge(rle.frPyObjects(outline, height, width)))
    runs = run_lengths(outline.get("counts"), height * width)
    values = np.arange(len(runs), dtype=np.uint8) % 2  # outside and inside take turns
    return np.repeat(values, runs).reshape((height, width), order="F")


def run_lengths(counts: Any, pixels: int) -> list[int]:
    """The lengths of the runs in a code for so many pixels, from a list or from COCO's compressed text."""
    runs = _uncompressed(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(is_number(run) and run >= 0 and run == int(run) for run in runs):
        raise ValueError("expected run lengths, a list of whole numbers or text")
    if sum(runs) != pixels:
        raise ValueError(f"run lengths of {sum(runs)} pixels, expected {pixels}")
    return [int(run) for run in runs]


def _uncompressed(text: str) -> list[int]:
    """Numbers of five bits a character, least first; from the fourth on as differences to the one before the last."""
    runs: list[int] = []
    value = bits = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or bits >= _MOST_BITS:
            raise ValueError(f"damaged run lengths at {character!r}")
        value |= (code & 31) << bits
        bits += 5
        if code & 32:  # the number goes on
            continue
        if code & 16:
            value -= 1 << bits
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = bits = 0
    if bits:
        raise ValueError("run lengths are cut short")
    return runs

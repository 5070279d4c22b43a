"""Reading annotation files in COCO's format, with a check of every entry."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from pycocotools import mask as rle

MIN_SIDE = 1.0  # pixels; narrower boxes are degenerate
_MAX_BITS = 35  # of one number in a compressed run-length code

Id = int | str


class ImageEntry(NamedTuple):
    """An entry of `images`.

    Attributes:
        file_name: path of the image in the folder of the split.
        width: in pixels.
        height: in pixels.
    """

    file_name: str
    width: int
    height: int


@dataclass(frozen=True)
class CocoFile:
    """The contents of an annotation file.

    Attributes:
        path: path of the file.
        images: images by id, sorted by id.
        categories: class names by id, sorted by id.
        annotations: annotations, not yet checked.
    """

    path: Path
    images: dict[Id, ImageEntry]
    categories: dict[Id, str]
    annotations: list[dict[str, Any]]


def read_coco(path: Path) -> CocoFile:
    """Read a file; a ValueError names the first invalid entry."""
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
    """A JSON value for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _received(entry: dict[str, Any], key: str) -> str:
    return f"got {shown(entry[key])}" if key in entry else "found none"


def _entries(contents: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    entries = contents.get(key)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list {key!r}, {_received(contents, key)}")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: {key}[{number}]: expected an object, got {shown(entry)}")
    return entries


def is_id(value: Any) -> TypeGuard[Id]:
    """Whether a value is a valid id, an integer or text."""
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
        raise ValueError(f"{where}: expected a whole number of pixels as {key!r}, {_received(entry, key)}")
    return int(value)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number small enough for a coordinate."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9  # false for NaN


def is_box(box: Any) -> TypeGuard[list[float]]:
    """Whether a value is a list of four numbers."""
    return isinstance(box, list) and len(box) == 4 and all(map(is_number, box))


def clipped_box(box: list[float], image: ImageEntry) -> list[float] | None:
    """Clip (left, top, width, height) to the image; returns left, top, right, bottom, or None if degenerate."""
    left, top, width, height = map(float, box)
    clipped = [max(left, 0.0), max(top, 0.0), min(left + width, image.width), min(top + height, image.height)]
    wide = clipped[2] - clipped[0] >= MIN_SIDE and clipped[3] - clipped[1] >= MIN_SIDE
    return clipped if wide else None


def is_polygon(polygon: Any, image: ImageEntry) -> bool:
    """Whether a value is a polygon of at least three points, none further from the image than the image is long.

    pycocotools visits every pixel of an edge: an edge of 1e8 pixels takes a minute, and NaN fills the memory.
    """
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        return False
    if not set(map(type, polygon)) <= {int, float}:
        return False
    side = max(image.width, image.height)
    # NaN does not show in minimum and maximum, but in the sum.
    return -side <= min(polygon) and max(polygon) <= 2 * side and math.isfinite(sum(polygon))


def outline_mask(outline: Any, height: int, width: int) -> np.ndarray:
    """Rasterise polygons or decode a run-length code to (height, width), uint8 of 0 and 1.

    Run-length codes are decoded here, because pycocotools accepts damaged ones.

    Raises:
        ValueError: the run-length code is damaged.
    """
    if isinstance(outline, list):
        return rle.decode(rle.merge(rle.frPyObjects(outline, height, width)))
    runs = run_lengths(outline.get("counts"), height * width)
    values = np.arange(len(runs), dtype=np.uint8) % 2  # background and mask alternate
    return np.repeat(values, runs).reshape((height, width), order="F")


def run_lengths(counts: Any, pixels: int) -> list[int]:
    """The run lengths of a code for an image of `pixels` pixels, from a list or from COCO's compressed text."""
    runs = _uncompressed(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(is_number(run) and run >= 0 and run == int(run) for run in runs):
        raise ValueError("expected run lengths as a list of integers or as text")
    if sum(runs) != pixels:
        raise ValueError(f"expected run lengths of {pixels} pixels, got {sum(runs)}")
    return [int(run) for run in runs]


def _uncompressed(text: str) -> list[int]:
    """Decode COCO's text: five bits a character, low bits first; run i > 2 is stored as its difference to run i - 2."""
    runs: list[int] = []
    value = bits = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or bits >= _MAX_BITS:
            raise ValueError(f"expected run lengths, got a damaged code at {character!r}")
        value |= (code & 31) << bits
        bits += 5
        if code & 32:  # more bits follow
            continue
        if code & 16:
            value -= 1 << bits
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = bits = 0
    if bits:
        raise ValueError("expected complete run lengths, got a truncated code")
    return runs

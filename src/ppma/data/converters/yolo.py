"""YOLO's layout: `images/SPLIT/NAME.jpg`, `labels/SPLIT/NAME.txt`, and a YAML file that names classes and folders.

A line of a label file is `class x y width height`, the centre and the size of a box, or `class x y x y x y ...`, a
polygon; coordinates are fractions of the image's width and height.
"""

from pathlib import Path
from typing import Any

import yaml

from ppma.data.converters.target import COCO_SPLITS, Instance, Target
from ppma.data.decoding import IMAGE_SUFFIXES, image_size
from ppma.data.layouts import images_in, read_names
from ppma.data.readers import find_split

_YAML = ("data.yaml", "data.yml", "dataset.yaml")
_NAMES = ("classes.txt", "obj.names")


def convert(source: Path, target: Target) -> None:
    """Add the instances of every split."""
    described = _description(source)
    root = source.parent if source.is_file() else source
    splits = _described_splits(described, root) if described else _folder_splits(root)
    classes = _class_names(described, root)
    for split, images in splits.items():
        labels = {image: _label_file(image) for image in images}
        if not any(path.is_file() for path in labels.values()):
            if split == "test":  # often published without labels
                continue
            where = next(iter(labels.values())) if labels else root / "images"
            raise ValueError(f"source: expected label files of the {split} split such as {where}, found none")
        samples = [(image, _instances(image, path, len(classes))) for image, path in labels.items()]
        target.add_instances(split, classes, samples)


def _description(source: Path) -> dict[str, Any]:
    """The contents of the YAML file; empty if there is none."""
    path = source if source.is_file() else next((source / name for name in _YAML if (source / name).is_file()), None)
    if path is None:
        return {}
    try:
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: expected YAML ({' '.join(str(error).split())})") from None
    if not isinstance(contents, dict) or "names" not in contents or "train" not in contents:
        raise ValueError(f"{path}: expected the keys names and train")
    return contents


def _class_names(described: dict[str, Any], root: Path) -> list[str]:
    if not described:
        path = next((root / name for name in _NAMES if (root / name).is_file()), None)
        if path is None:
            raise ValueError(f"source: expected {_YAML[0]} or {_NAMES[0]} in {root}, found neither")
        return read_names(path)
    names = described["names"]
    if isinstance(names, dict) and set(names) == set(range(len(names))):
        names = [names[label] for label in range(len(names))]
    if not isinstance(names, list) or not names:
        raise ValueError("names: expected a list of class names, or names by number from 0")
    return list(map(str, names))


def _folder_splits(root: Path) -> dict[str, list[Path]]:
    """The folders of `images/`, or `images/` as training split."""
    images = root / "images"
    if not images.is_dir():
        raise ValueError(f"source: expected a folder {images}, found none")
    found = {split: folder for split in COCO_SPLITS if (folder := find_split(str(images), split))}
    return {split: images_in(folder) for split, folder in found.items()} or {"train": images_in(images)}


def _described_splits(described: dict[str, Any], root: Path) -> dict[str, list[Path]]:
    base = root / str(described.get("path") or "")
    splits: dict[str, list[Path]] = {}
    for split in COCO_SPLITS:
        given = described.get(split)
        parts = given if isinstance(given, list) else [given] if given else []
        images = [image for part in parts for image in _listed(str(part), base, root)]
        if images:
            splits[split] = images
    return splits


def _listed(part: str, base: Path, root: Path) -> list[Path]:
    """The images of a folder or of a list in a text file."""
    # `path` is often that of another machine, and some exporters write ../train/images for train/images.
    tried = [base / part, root / part, root / part.removeprefix("../")]
    found = next((path for path in tried if path.exists()), None)
    if found is None:
        raise ValueError(f"source: expected a folder or a list of images at {tried[0]}, found none")
    if found.is_file():
        return [path if path.is_absolute() else found.parent / path for path in map(Path, read_names(found))]
    inside = (path for path in found.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    return sorted(inside)


def _label_file(image: Path) -> Path:
    """The text file of an image: `labels` in place of the last `images` in its path."""
    parts = list(image.parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return Path(*parts).with_suffix(".txt")


def _instances(image: Path, labels: Path, classes: int) -> list[Instance]:
    """The instances of an image; none without a file, which stands for an image without objects."""
    if not labels.is_file():
        return []
    width, height = image_size(image, (0, 0))
    lines = enumerate(labels.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
    return [_instance(line, f"{labels}:{number}", classes, width, height) for number, line in lines if line.strip()]


def _instance(line: str, where: str, classes: int, width: int, height: int) -> Instance:
    try:
        label, *numbers = map(float, line.split())
    except ValueError:
        raise ValueError(f"{where}: expected numbers, got {line[:40]!r}") from None
    if label not in range(classes):
        raise ValueError(f"{where}: expected a class from 0 to {classes - 1}, got {label:g}")
    wrong = [number for number in numbers if not 0 <= number <= 1]
    if wrong:
        raise ValueError(f"{where}: expected fractions of the image from 0 to 1, got {wrong[0]:g}")
    if len(numbers) == 4:
        x, y, across, down = numbers
        if across == 0 or down == 0:
            raise ValueError(f"{where}: expected a box with an area, got {across:g} x {down:g}")
        box = ((x - across / 2) * width, (y - down / 2) * height, across * width, down * height)
        return Instance(int(label), box)
    if len(numbers) < 6 or len(numbers) % 2:
        raise ValueError(f"{where}: expected 4 numbers (a box) or 3 and more points, got {len(numbers)} numbers")
    columns = [number * width for number in numbers[::2]]
    rows = [number * height for number in numbers[1::2]]
    left, top = min(columns), min(rows)
    polygon = [value for point in zip(columns, rows, strict=True) for value in point]
    return Instance(int(label), (left, top, max(columns) - left, max(rows) - top), [polygon])

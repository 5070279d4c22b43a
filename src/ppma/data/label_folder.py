"""Folders of images with label maps, as CamVid's: `images/`, `labels/` and `classes.txt`, with or without splits."""

from pathlib import Path

from ppma.data.layouts import Layout, Pair, existing_pairs, images_in, read_names
from ppma.data.readers import find_split

_IMAGES = "images"
_MAPS = ("labels", "masks", "annotations")
_ENDINGS = ("", "_L", "_P")  # of the names of label maps; CamVid has the last two
_NAMES = ("classes.txt", "codes.txt")


def _pairs(root: Path, split: str) -> list[Pair]:
    """Images in `images/SPLIT` and label maps in `labels/SPLIT`; an empty split stands for the folders themselves."""
    images = find_split(str(root / _IMAGES), split) or root / _IMAGES / split
    maps = next((root / name for name in _MAPS if (root / name).is_dir()), root / _MAPS[0])
    maps = find_split(str(maps), split) or maps / split
    found = images_in(images)
    if not maps.is_dir():
        raise ValueError(f"data.root: expected a folder {maps}, found none")
    return existing_pairs(((path, _map_of(path, maps)) for path in found), images, str(maps))


def _map_of(image: Path, maps: Path) -> Path:
    named = [maps / f"{image.stem}{ending}.png" for ending in _ENDINGS]
    return next((path for path in named if path.is_file()), named[0])


def _classes(root: Path) -> tuple[str, tuple[str, ...]]:
    source = next((root / name for name in _NAMES if (root / name).is_file()), None)
    return (f"{_NAMES[0]} in {root}", ()) if source is None else (str(source), tuple(read_names(source)))


LAYOUT = Layout(_pairs, _classes, "train", "val", labels="plain", split_folder=_IMAGES)

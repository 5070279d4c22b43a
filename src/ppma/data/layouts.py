"""How a segmentation data set is laid out on disk. `docs/contributing/dataset.md` shows how to add one."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ppma.data.decoding import IMAGE_SUFFIXES
from ppma.data.label_maps import Convention

Colour = tuple[int, int, int]
Pair = tuple[Path, Path]


@dataclass(frozen=True)
class Layout:
    """Where a data set keeps its images, its label maps and the names of its classes.

    Attributes:
        pairs: takes the root and a split, returns each image with its label map.
        classes: takes the root, returns where the classes are named and the names; no names where that file is missing.
        train_split: default training split.
        val_split: default validation split.
        labels: convention of the label maps, None where data sets of this layout differ.
        palette: colours of the classes in drawings, None for generated ones.
        hint: what to check when a label is out of range.
        split_folder: folder of images in which each split has a folder; without one for the validation split, a part of
            the training images is used, or of the images directly in the folder. None: the splits are given.
    """

    pairs: Callable[[Path, str], list[Pair]]
    classes: Callable[[Path], tuple[str, tuple[str, ...]]]
    train_split: str
    val_split: str
    labels: Convention | None = None
    palette: tuple[Colour, ...] | None = None
    hint: str = "see data.labels and data.ignore_index"
    split_folder: str | None = None


def images_in(folder: Path) -> list[Path]:
    """The images of a folder, sorted by name."""
    if not folder.is_dir():
        raise ValueError(f"data.root: expected a folder {folder}, found none")
    try:
        return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    except OSError as error:
        raise ValueError(f"data.root: {folder}: {error.strerror}") from None


def read_names(path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected text in UTF-8 ({error})") from None


def existing_pairs(pairs: Iterable[Pair], images: Path, maps: str) -> list[Pair]:
    """The pairs whose label map exists; a warning counts the others.

    Args:
        pairs: each image with the path of its label map.
        images: folder of the images, for messages.
        maps: folder or pattern of the label maps, for messages.
    """
    pairs = list(pairs)
    found = [(image, labels) for image, labels in pairs if labels.is_file()]
    if not found:
        raise ValueError(f"data.root: expected images with label maps in {images} and {maps}, found none")
    if len(found) < len(pairs):
        missing = next(labels for _, labels in pairs if not labels.is_file())
        count = len(pairs) - len(found)
        warnings.warn(f"{images}: skipped {count} images without a label map, such as {missing}", stacklevel=4)
    return found

"""Image folders, and Hugging Face and torchvision data sets, through timm's dataset factory."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data import create_dataset

from ppma.data.decoding import IMAGE_SUFFIXES, decode
from ppma.data.errors import BrokenSampleError
from ppma.data.source import ArrayImages, ImageSource


class ReaderImages(ImageSource):
    """Images of one of timm's readers, decoded by `ppma.data.decoding.decode`, which names broken files.

    Args:
        reader: returns an open file and a label by index.
        root: where it reads, for messages.
    """

    def __init__(self, reader: Any, root: str) -> None:
        self.reader, self.root = reader, root
        names = getattr(reader, "class_to_idx", {})
        self.classes = tuple(sorted(names, key=names.__getitem__))

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        name = str(Path(self.root) / self.reader.filename(index))
        try:
            file, label, *_ = self.reader[index]
        except OSError as error:  # a dangling link, or no permission
            raise BrokenSampleError(f"{name}: {error.strerror or error}") from None
        with file:
            return decode(file, name), int(label)

    def labels(self) -> Sequence[int]:
        samples = getattr(self.reader, "samples", None)
        if samples is not None:
            return [int(label) for _, label in samples]
        return [int(self.reader[index][1]) for index in range(len(self))]


def check_class_folders(folder: Path) -> None:
    """Raise unless every class folder holds an image: an empty one would shift the labels of those that follow."""
    folders = [child for child in sorted(folder.iterdir()) if child.is_dir()]
    if not folders:
        raise ValueError(f"data.root: expected one folder for each class in {folder}, found no folders")
    empty = [child.name for child in folders if not any(map(_is_image, child.rglob("*")))]
    if empty:
        shown = ", ".join(empty[:10]) + (", ..." if len(empty) > 10 else "")
        raise ValueError(f"data.root: no image in {len(empty)} class folders of {folder}: {shown}")


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def check_class_names(folder: Path, files: Iterable[str]) -> None:
    """Raise unless every image is in a class folder and no two class folders have the same name."""
    named: dict[str, str] = {}
    for parent in sorted({os.path.dirname(file) for file in files}):
        if Path(parent) == folder:
            raise ValueError(f"data.root: expected images in class folders only, found some directly in {folder}")
        name = os.path.basename(parent)
        if name in named:
            raise ValueError(f"data.root: {named[name]} and {parent} would be one class, {name!r}")
        named[name] = parent


def find_split(root: str, split: str) -> Path | None:
    """The folder `root/split`, if any; like timm, also finds "val" as "valid" or "validation", and so on."""
    synonyms = {"train": ("train", "training"), "val": ("val", "valid", "validation", "eval", "evaluation")}
    return next((Path(root) / name for name in synonyms.get(split, (split,)) if (Path(root) / name).is_dir()), None)


def folder_images(root: str, split: str | None) -> ImageSource:
    """Open a folder that has one folder for each class, or `split` inside it."""
    if not Path(root).is_dir():
        raise ValueError(f"data.root: expected a folder, found none at {root}")
    folder = Path(root) if split is None else find_split(root, split)
    if folder is None:
        raise ValueError(f"data.root: expected a folder {split!r} with one folder for each class in {root}, found none")
    try:
        check_class_folders(folder)
    except OSError as error:
        raise ValueError(f"data.root: {error.filename}: {error.strerror}") from None
    images = _from_timm("", str(folder), split or "", input_key=";".join(IMAGE_SUFFIXES))
    assert isinstance(images, ReaderImages)
    check_class_names(folder, (path for path, _ in images.reader.samples))
    return images


def timm_images(name: str, root: str | None, split: str) -> ImageSource:
    """Open a data set of timm's factory: "torch/cifar10", "hfds/owner/name", ..."""
    if name.split("/")[0] in ("wds", "tfds", "hfids"):
        raise ValueError(
            f"data.name: {name!r} is a stream, which cannot be resumed exactly or evaluated without repeats; "
            'use "webdataset" for local shards, "hfds/..." for Hugging Face data sets'
        )
    return _from_timm(name, root, split)


def _from_timm(name: str, root: str | None, split: str, **options: Any) -> ImageSource:
    try:
        dataset = create_dataset(name, root=root, split=split, search_split=False, **options)
    except (RuntimeError, AssertionError, ImportError, OSError) as error:
        raise ValueError(f"data.name, data.root: {name or 'folder'} at {root}: {error}") from None
    if hasattr(dataset, "reader"):
        return ReaderImages(dataset.reader, root or name)
    return ArrayImages(np.asarray(dataset.data), np.asarray(dataset.targets), list(map(str, dataset.classes)))

"""What using a trained detector and a trained segmenter have in common: data, images."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from PIL import Image

from ppma import config as configs
from ppma.data.decoding import Report, image_files, read_images
from ppma.recipes import is_recipe
from ppma.tasks.dense.config import DenseConfig
from ppma.tasks.registry import load_config

Config = TypeVar("Config", bound=DenseConfig)


def data_configuration(stored: Config, data: str, assignments: Iterable[str]) -> Config:
    """The configuration of an evaluation.

    Args:
        stored: the checkpoint's.
        data: a recipe, or a folder that replaces the stored one's `data.root`.
        assignments: `key=value` changes.
    """
    if is_recipe(data):
        chosen = load_config(data, assignments)
        if not isinstance(chosen, type(stored)):
            raise configs.ConfigError(f"{data}: expected a {stored.task}, as the checkpoint is, got {chosen.task}")
        return chosen
    if not Path(data).is_dir():
        raise ValueError(f"data: expected a recipe or a folder, got {data!r}")
    values = configs.override(configs.to_dict(stored), [f"data.root={data}", *assignments])
    return configs.build(type(stored), values)


def open_pictures(
    images: Sequence[str | Path], out: str | Path | None, report: Report | None = None
) -> Iterator[tuple[str, Image.Image, Path]]:
    """Each image with its path and the path its drawing is written to.

    Args:
        images: paths; a folder stands for the images in it.
        out: a file for one image, a folder for several; None for NAME_overlay.png where the command runs.
        report: see `read_images`.
    """
    paths, problems = image_files(images)
    targets = _targets(paths, None if out is None else Path(out))
    for path, picture in read_images(paths, problems, report):
        yield str(path), picture, targets[path]


def _targets(paths: Sequence[Path], out: Path | None) -> dict[Path, Path]:
    """Where each drawing goes; no two to the same place, none over its own image."""
    folder = Path() if out is None else out
    alone = out is not None and len(paths) == 1 and not out.is_dir()
    targets: dict[Path, Path] = {}
    for path in dict.fromkeys(paths):
        target = folder if alone else folder / f"{path.stem}_overlay.png"
        number = 1
        while target in targets.values():  # images of the same name in different folders
            number += 1
            target = folder / f"{path.stem}_overlay_{number}.png"
        targets[path] = target
    if alone and folder.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"out: expected a .png or .jpg file, or a folder, got {folder}")
    if alone and folder.resolve() == paths[0].resolve():
        raise ValueError(f"out: expected another file than the image, got {folder}")
    for parent in {target.parent for target in targets.values()}:
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"out: {parent}: {error.strerror}") from None
        if not os.access(parent, os.W_OK):
            raise ValueError(f"out: {parent}: expected a folder that can be written to")
    return targets


def save_drawing(picture: Image.Image, target: Path) -> None:
    """Write what was drawn; a disk that refuses is a ValueError."""
    try:
        picture.save(target)
    except OSError as error:
        raise ValueError(f"out: {target}: {error.strerror or error}") from None

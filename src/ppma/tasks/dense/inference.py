"""Evaluation and prediction of dense models: data, batches, drawings."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from torch import Tensor

from ppma import config as configs
from ppma.data.decoding import Report, image_files, read_images
from ppma.data.source import check_classes
from ppma.recipes import is_recipe
from ppma.tasks.base import Prediction
from ppma.tasks.registry import load_config

Config = TypeVar("Config")


def data_configuration(stored: Config, task: str, data: str, assignments: Iterable[str]) -> Config:
    """The configuration of an evaluation.

    Args:
        stored: configuration from the checkpoint; its fields are a subset of those of the task's schema.
        task: name of the checkpoint's task.
        data: a recipe, or a folder that replaces `data.root`.
        assignments: `key=value` overrides.
    """
    if is_recipe(data):
        chosen = load_config(data, assignments)
        if chosen.task != task:
            raise configs.ConfigError(f"{data}: expected a {task} recipe for this checkpoint, got {chosen.task}")
        return type(stored)(**{field.name: getattr(chosen, field.name) for field in dataclasses.fields(stored)})  # type: ignore[arg-type]
    if not Path(data).is_dir():
        raise ValueError(f"data: expected a recipe or a folder, got {data!r}")
    values = configs.override(configs.to_dict(stored), [f"data.root={data}", *assignments])
    return configs.build(type(stored), values)


def check_data_classes(found: tuple[str, ...], classes: tuple[str, ...]) -> None:
    """Compare the classes of the data with the checkpoint's; numbers, of a file without names, fit any names."""
    if len(found) != len(classes) or classes != tuple(map(str, range(len(classes)))):
        check_classes(found, classes, found="the data", expected="the checkpoint")


def open_pictures(
    images: Sequence[str | Path], out: str | Path | None, report: Report | None = None
) -> Iterator[tuple[str, Image.Image, Path]]:
    """Read images one by one.

    Args:
        images: paths of images, or of folders of images.
        out: see `DrawingOptions`.
        report: see `read_images`.

    Yields:
        The path of the image, the image, and the path to write its drawing to.
    """
    paths, problems = image_files(images)
    targets = _targets(paths, None if out is None else Path(out))
    for path, picture in read_images(paths, problems, report):
        yield str(path), picture, targets[path]


def _targets(paths: Sequence[Path], out: Path | None) -> dict[Path, Path]:
    """The output path of each image, all different, none of them the image itself."""
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


@dataclass(frozen=True)
class DrawingOptions:
    """Options of drawings.

    Attributes:
        out: a file for one image, a folder for several; None for NAME_overlay.png in the working directory.
    """

    out: str | None = None


def drawn(path: str, target: Path, values: dict[str, Any], rows: list[str]) -> Prediction:
    """The prediction for an image whose drawing was written to `target`."""
    found = {"image": path, "overlay": str(target), **values}
    return Prediction(found, [f"{path}, drawn in {target}", *(f"  {row}" for row in rows)])


def collate(samples: list[tuple[Tensor, Any]]) -> tuple[list[Tensor], list[Any]]:
    """Batch samples as lists, because image sizes differ."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def save_drawing(picture: Image.Image, target: Path) -> None:
    """Write a drawing; raises ValueError if that fails."""
    try:
        picture.save(target)
    except OSError as error:
        raise ValueError(f"out: {target}: {error.strerror or error}") from None

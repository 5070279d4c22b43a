"""What using a trained detector and a trained segmenter have in common: data, images."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from PIL import Image

from ppma import config as configs
from ppma.data.source import decode, image_files
from ppma.tasks.dense.config import DenseConfig
from ppma.tasks.registry import load_config

Config = TypeVar("Config", bound=DenseConfig)


def data_configuration(stored: Config, data: str, assignments: Iterable[str]) -> Config:
    """The configuration of an evaluation.

    Args:
        stored: the checkpoint's.
        data: a configuration file, or a folder that replaces the stored one's `data.root`.
        assignments: `key=value` changes.
    """
    if Path(data).suffix in (".yaml", ".yml"):
        chosen = load_config(data, assignments)
        if not isinstance(chosen, type(stored)):
            raise configs.ConfigError(f"{data}: expected a {stored.task}, as the checkpoint is, got {chosen.task}")
        return chosen
    if not Path(data).is_dir():
        raise ValueError(f"data: expected a configuration file or a folder, got {data!r}")
    values = configs.override(configs.to_dict(stored), [f"data.root={data}", *assignments])
    return configs.build(type(stored), values)


def open_pictures(images: Sequence[str | Path], out: str | Path | None) -> Iterator[tuple[str, Image.Image, Path]]:
    """Each image with its path and the path its drawing is written to.

    Args:
        images: paths.
        out: a file for one image, a folder for several; None for NAME_overlay.png where the command runs.
    """
    paths = image_files(images)
    for path in paths:
        target = Path(f"{path.stem}_overlay.png") if out is None else Path(out)
        if out is not None and (len(paths) > 1 or target.is_dir()):
            target = target / f"{path.stem}_overlay.png"
        if target.suffix.lower() not in (".png", ".jpg", ".jpeg"):
            raise ValueError(f"out: expected a .png or .jpg file, or a folder, got {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        yield str(path), decode(path, str(path)), target

"""What using a trained detector and a trained segmenter have in common: data, images, evaluation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from ppma import config as configs
from ppma.data.source import decode
from ppma.engine import distributed
from ppma.engine.evaluation import BrokenSamples, evaluate
from ppma.engine.task import Metrics
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


def evaluate_model(
    model: nn.Module,
    metrics: Metrics,
    dataset: Dataset,
    collate: Callable[[list[Any]], Any],
    *,
    batch_size: int = 4,
    workers: int = 0,
    amp: str = "none",
    max_broken: int = 50,
) -> dict[str, float]:
    """Measure on every sample once; under torchrun they are shared out.

    Args:
        model: in evaluation mode.
        metrics: a fresh object.
        dataset: the samples.
        collate: of a batch.
        batch_size: for one process.
        workers: loader processes.
        amp: "none", "bf16" or "fp16".
        max_broken: broken images that are skipped before it stops.
    """
    with distributed.world() as world:
        return evaluate(
            model.to(world.device),
            metrics,
            dataset,
            collate,
            batch_size=batch_size,
            workers=workers,
            world=world,
            broken=BrokenSamples(max_broken),
            amp=amp,
        )


def open_pictures(images: Sequence[str | Path], out: str | Path | None) -> Iterator[tuple[str, Image.Image, Path]]:
    """Each image with its path and the path its drawing is written to.

    Args:
        images: paths.
        out: a file for one image, a folder for several; None for NAME_overlay.png where the command runs.
    """
    paths = [Path(path) for path in images]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"image: expected files, found none at {', '.join(missing)}")
    for path in paths:
        target = Path(f"{path.stem}_overlay.png") if out is None else Path(out)
        if out is not None and (len(paths) > 1 or target.is_dir()):
            target = target / f"{path.stem}_overlay.png"
        if target.suffix.lower() not in (".png", ".jpg", ".jpeg"):
            raise ValueError(f"out: expected a .png or .jpg file, or a folder, got {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        yield str(path), decode(path, str(path)), target

"""Evaluation, prediction and export of trained classifiers."""

import itertools
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ppma.config import ConfigError, require
from ppma.data.arrays import digits
from ppma.data.decoding import Report, image_files, read_images
from ppma.data.imagenet import readable
from ppma.data.images import TransformedImages, open_images
from ppma.data.readers import folder_images
from ppma.data.source import ImageSource, check_classes
from ppma.engine.distributed import select_device
from ppma.models import Checkpoint
from ppma.models.loading import load_classifier, load_model
from ppma.outputs import csv_bytes
from ppma.recipes import is_recipe
from ppma.tasks.base import Evaluation, Prediction
from ppma.tasks.classification.config import ClassificationConfig
from ppma.tasks.classification.metrics import ClassificationMetrics
from ppma.tasks.prediction import PredictOptions, ResultFolder
from ppma.tasks.registry import load_config

TABLE = "predictions.csv"


def find_images(data: str, *, split: str | None = None, assignments: Iterable[str] = ()) -> ImageSource:
    """Open held-out images.

    Args:
        data: a recipe, a folder (with the split in it, or with one folder for each class), or "digits".
        split: name of the split; None for the recipe's test or validation split, or the digits' test split.
        assignments: `key=value` changes of a recipe.
    """
    path = Path(data)
    if is_recipe(data):
        config = load_config(data, assignments)
        if not isinstance(config, ClassificationConfig):
            raise ConfigError(f"{data}: expected a classification, got {config.task}")
        return open_images(config.data, split or config.data.test_split or config.data.val_split)
    if list(assignments):
        raise ConfigError(f"--set: expected a recipe to change as --data, got {data!r}")
    if data == "digits":
        return digits(split or "test")
    if not path.is_dir():
        raise ValueError(f"data: expected a recipe, a folder or 'digits', got {data!r}")
    wanted = [split] if split else ["val", "validation", "test"]
    inside = [name for name in wanted if (path / name).is_dir()]
    if split and not inside:
        raise ValueError(f"split: expected a folder {split!r} in {data}, found none")
    return folder_images(data, inside[0] if inside else None)


def evaluation(
    checkpoint: Checkpoint, data: str, split: str | None = None, assignments: Iterable[str] = ()
) -> Evaluation:
    """Evaluate top-1, top-5 and cross-entropy on the images of `find_images`."""
    model, preprocessing, classes = load_classifier(checkpoint)
    source = find_images(data, split=split, assignments=assignments)
    check_classes(source.classes, classes, found="the data", expected="the checkpoint")
    metrics = ClassificationMetrics(readable(classes))
    return Evaluation(model, metrics, TransformedImages(source, preprocessing.transform()))


@dataclass(frozen=True)
class ClassifyOptions(PredictOptions):
    """Options of classification's `predict`.

    Attributes:
        top: number of classes to show.
        batch_size: images that the model sees at once.
    """

    top: int = 5
    batch_size: int = 16

    def __post_init__(self) -> None:
        require(self.top >= 1, "top", "at least 1", self.top)
        require(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)


@torch.inference_mode()
def predict(
    checkpoint: Checkpoint, images: Sequence[str | Path], options: ClassifyOptions, report: Report | None = None
) -> Generator[Prediction, None, None]:
    """Predict the `top` most probable classes and their probabilities, most probable first.

    With `options.out`, predictions.csv has a row for each of them: file, rank, class, probability.
    """
    device = select_device(options.device)
    paths, problems = image_files(images)
    folder = ResultFolder(options.out, paths, names=[TABLE], overwrite=options.overwrite)
    model, preprocessing, classes = load_classifier(checkpoint)
    model, classes, transform = model.to(device), readable(classes), preprocessing.transform()
    rows: list[tuple[Any, ...]] = []
    readable_images = read_images(paths, problems, report)
    try:
        while batch := list(itertools.islice(readable_images, options.batch_size)):
            scores = model(torch.stack([transform(image) for _, image in batch]).to(device)).float().softmax(-1).cpu()
            for (path, _), probabilities in zip(batch, scores, strict=True):
                best = probabilities.topk(min(options.top, len(classes)))
                names, values = [classes[index] for index in best.indices.tolist()], best.values.tolist()
                ranked = list(zip(names, values, strict=True))
                rows += [(str(path), rank, *pair) for rank, pair in enumerate(ranked, start=1)]
                lines = [str(path), *(f"  {value:7.2%}  {name}" for name, value in ranked)]
                yield Prediction({"image": str(path), "classes": names, "probabilities": values}, lines)
    finally:
        folder.write(TABLE, csv_bytes(("file", "rank", "class", "probability"), rows))


def exportable(checkpoint: Checkpoint, **changes: Any) -> tuple[nn.Module, dict[str, str]]:
    """Load the whole classifier."""
    model: Any = load_model(checkpoint, **changes)
    return model, {"logits": "class scores" if model.num_classes else "features"}

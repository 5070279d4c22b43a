"""What a trained classifier is used for: accuracy on a data set, classes of single images."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ppma.classifier import load_classifier
from ppma.config import ConfigError
from ppma.data.classes import check_classes
from ppma.data.decoding import Report, image_files, read_images
from ppma.data.images import ImageDataConfig, TransformedImages, eval_transform, open_images
from ppma.data.readers import folder_images
from ppma.data.source import ImageSource
from ppma.engine.evaluation import evaluate_model
from ppma.recipes import is_recipe
from ppma.tasks.classification.config import ClassificationConfig
from ppma.tasks.classification.task import ClassificationMetrics, collate
from ppma.tasks.registry import load_config


def find_images(data: str, *, split: str | None = None, assignments: Iterable[str] = ()) -> ImageSource:
    """Held-out images from what a user calls them.

    Args:
        data: a recipe, a folder (with the split in it, or one folder for each class), or "digits".
        split: which part; the configuration's `val_split` if None, the test part of the digits.
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
        return open_images(ImageDataConfig(name="digits"), split or "test")
    if not path.is_dir():
        raise ValueError(f"data: expected a recipe, a folder or 'digits', got {data!r}")
    wanted = [split] if split else ["val", "validation", "test"]
    inside = [name for name in wanted if (path / name).is_dir()]
    if split and not inside:
        raise ValueError(f"split: expected a folder {split!r} in {data}, found none")
    return folder_images(data, inside[0] if inside else None)


def evaluate_classifier(
    checkpoint: str | Path,
    data: str,
    *,
    split: str | None = None,
    assignments: Iterable[str] = (),
    batch_size: int = 64,
    **options: Any,
) -> dict[str, float]:
    """Top-1, top-5, cross-entropy, count and throughput; under torchrun the images are shared out.

    Args:
        checkpoint: any file that `ppma.load_checkpoint` reads.
        data: see `find_images`.
        split: see there.
        assignments: see there.
        batch_size: for one process.
        options: of `evaluate_model`, such as `workers`.
    """
    model, preparation = load_classifier(checkpoint)
    source = find_images(data, split=split, assignments=assignments)
    check_classes(source.classes, preparation.classes, found="the data", expected="the checkpoint")
    transform = eval_transform(preparation.apply_to(ImageDataConfig(name="digits")))
    images = TransformedImages(source, transform)
    return evaluate_model(model, ClassificationMetrics(), images, collate, batch_size=batch_size, **options)


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one image, with their probabilities, likeliest first."""

    image: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]


@torch.inference_mode()
def predict(
    checkpoint: str | Path, images: Sequence[str | Path], *, top: int = 5, report: Report | None = None
) -> Iterator[Prediction]:
    """Classify image files, each as it is asked for.

    Args:
        checkpoint: any file that `ppma.load_checkpoint` reads.
        images: paths; a folder stands for the images in it.
        top: how many classes.
        report: see `ppma.data.decoding.read_images`.
    """
    if top < 1:
        raise ValueError(f"top: expected at least 1, got {top}")
    model, preparation = load_classifier(checkpoint)
    transform = eval_transform(preparation.apply_to(ImageDataConfig(name="digits")))
    for path, image in read_images(*image_files(images), report):
        probabilities = model(transform(image)[None]).float().softmax(-1)[0]
        best = probabilities.topk(min(top, len(probabilities)))
        names = tuple(preparation.classes[index] for index in best.indices.tolist())
        yield Prediction(str(path), names, tuple(best.values.tolist()))

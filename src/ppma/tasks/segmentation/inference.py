"""What a trained segmenter is used for: intersection over union on a data set, the classes of an image's pixels."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ppma.data.ade20k import Ade20kImages
from ppma.data.classes import check_classes
from ppma.data.decoding import Report
from ppma.data.pixels import image_tensor
from ppma.engine.evaluation import evaluate_model
from ppma.tasks.dense.overlay import draw_classes
from ppma.tasks.dense.use import data_configuration, open_pictures, save_drawing
from ppma.tasks.segmentation.metrics import PixelMetrics
from ppma.tasks.segmentation.task import announce_labels, collate
from ppma.tasks.segmentation.testing import probabilities
from ppma.tasks.segmentation.weights import load_segmenter, numbered


def evaluate_checkpoint(
    checkpoint: str | Path,
    data: str,
    *,
    split: str | None = None,
    assignments: Iterable[str] = (),
    batch_size: int = 4,
    **options: Any,
) -> dict[str, float]:
    """mIoU, mAcc and aAcc.

    Args:
        checkpoint: a file of `ppma train`, or one in MMSegmentation's layout.
        data: a recipe, or a folder in ADE20K's layout.
        split: which part; `data.val_split` if None.
        assignments: `key=value` changes of the configuration, for example `test.flip=true`.
        batch_size: for one process.
        options: of `evaluate_model`, such as `workers`.
    """
    model, stored, classes = load_segmenter(checkpoint)
    config = data_configuration(stored, data, assignments)
    held_out = Ade20kImages(config.data, split or config.data.val_split)
    if len(held_out.classes) != len(classes) or classes != numbered(len(classes)):  # numbers stand for any names
        check_classes(held_out.classes, classes, found="the data", expected="the checkpoint")
    announce_labels(held_out)
    metrics = PixelMetrics(len(classes), config.data, config.test)
    return evaluate_model(model, metrics, held_out, collate, batch_size=batch_size, **options)


@torch.inference_mode()
def predict(
    checkpoint: str | Path,
    images: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    report: Report | None = None,
) -> Iterator[dict[str, Any]]:
    """Classify pixels and draw them; gives plain values for each image as it is done.

    Args:
        checkpoint: a file of `ppma train`, or one in MMSegmentation's layout.
        images: paths; a folder stands for the images in it.
        out: see `open_pictures`.
        report: see `ppma.data.decoding.read_images`.
    """
    model, config, classes = load_segmenter(checkpoint)
    for path, picture, target in open_pictures(images, out, report):
        labels = probabilities(model, image_tensor(picture), config.data, config.test).argmax(0)
        save_drawing(draw_classes(picture, labels, classes), target)
        shares = torch.bincount(labels.flatten(), minlength=len(classes)) / labels.numel()
        present = sorted(((share, name) for share, name in zip(shares.tolist(), classes, strict=True) if share))[::-1]
        yield {"image": path, "overlay": str(target), "shares": {name: s for s, name in present}}


def rows(prediction: dict[str, Any]) -> list[str]:
    """The classes in one image, a line for each."""
    return [f"{share:7.2%}  {name}" for name, share in prediction["shares"].items()]

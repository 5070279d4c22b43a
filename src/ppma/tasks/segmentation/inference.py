"""Evaluation, prediction and export of trained segmentation models."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ppma.data.decoding import Report
from ppma.data.preprocessing import image_tensor
from ppma.data.segmentation import SegmentationImages
from ppma.data.source import check_classes
from ppma.models import Checkpoint
from ppma.tasks.base import Evaluation, Prediction
from ppma.tasks.dense.inference import DrawingOptions, data_configuration, drawn, open_pictures, save_drawing
from ppma.tasks.dense.overlay import draw_classes
from ppma.tasks.segmentation.metrics import PixelMetrics
from ppma.tasks.segmentation.model import MainScores
from ppma.tasks.segmentation.scoring import probabilities
from ppma.tasks.segmentation.weights import load_segmenter


def with_histogram(images: SegmentationImages) -> SegmentationImages:
    """Print the pixels of each class, in the main process; returns its argument."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(images.counts.lines(str(images.maps))), file=sys.stderr)
    return images


def evaluation(checkpoint: Checkpoint, data: str, split: str | None, assignments: Iterable[str]) -> Evaluation:
    """See `ppma.tasks.base.Task.evaluation`; `data` is a recipe or the folder of a data set."""
    model, stored, classes = load_segmenter(checkpoint)
    config = data_configuration(stored, "segmentation", data, assignments)
    held_out = SegmentationImages(config.data, split or config.data.split("val"))
    if checkpoint.native or len(held_out.classes) != len(classes):  # MMSegmentation abbreviates ADE20K's names
        check_classes(held_out.classes, classes, found="the data", expected="the checkpoint")
    return Evaluation(model, PixelMetrics(len(classes), config.data, config.test), with_histogram(held_out))


@torch.inference_mode()
def predict(
    checkpoint: Checkpoint, images: Sequence[str | Path], options: DrawingOptions, report: Report | None = None
) -> Iterator[Prediction]:
    """Segment images and draw the classes of their pixels, see `ppma.tasks.base.Task.predict`."""
    model, config, classes = load_segmenter(checkpoint)
    palette = checkpoint.palette or config.data.layout.palette
    for path, picture, target in open_pictures(images, options.out, report):
        labels = probabilities(model, image_tensor(picture), config.data, config.test).argmax(0)
        save_drawing(draw_classes(picture, labels, classes, palette), target)
        shares = torch.bincount(labels.flatten(), minlength=len(classes)) / labels.numel()
        present = sorted(((share, name) for share, name in zip(shares.tolist(), classes, strict=True) if share))[::-1]
        rows = [f"{share:7.2%}  {name}" for share, name in present]
        yield drawn(path, target, {"shares": {name: share for share, name in present}}, rows)


def exportable(checkpoint: Checkpoint, **changes: Any) -> tuple[nn.Module, dict[str, str]]:
    """The model without its auxiliary head, see `ppma.tasks.base.Task.exportable`."""
    if checkpoint.native and changes:
        given = " ".join(f"--{option}" for option in changes)
        raise ValueError(f"{given}: expected no such option for a file of `ppma train`, which has its own settings")
    model, _, _ = load_segmenter(checkpoint, **changes)
    return MainScores(model).eval(), {"logits": "class scores (batch, classes, height, width)"}

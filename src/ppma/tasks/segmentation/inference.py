"""What a trained segmenter is used for: intersection over union on a data set, the classes of an image's pixels."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ppma.data.ade20k import Ade20kImages
from ppma.data.decoding import Report
from ppma.data.preprocessing import image_tensor
from ppma.data.source import check_classes
from ppma.models import Checkpoint
from ppma.tasks.base import Evaluation, Prediction
from ppma.tasks.dense.inference import DrawingOptions, data_configuration, drawn, open_pictures, save_drawing
from ppma.tasks.dense.overlay import draw_classes
from ppma.tasks.segmentation.metrics import PixelMetrics
from ppma.tasks.segmentation.model import MainScores
from ppma.tasks.segmentation.scoring import probabilities
from ppma.tasks.segmentation.weights import load_segmenter, numbered


def announce_labels(images: Ade20kImages) -> Ade20kImages:
    """Print how much there is of each class, in one process of several; returns what was given."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(images.counts.lines(str(images.maps))), file=sys.stderr)
    return images


def evaluation(checkpoint: Checkpoint, data: str, split: str | None, assignments: Iterable[str]) -> Evaluation:
    """mIoU, mAcc and aAcc, on a folder in ADE20K's layout; `test.flip=true` and the like change the scoring."""
    model, stored, classes = load_segmenter(checkpoint)
    config = data_configuration(stored, "segmentation", data, assignments)
    held_out = Ade20kImages(config.data, split or config.data.val_split)
    if len(held_out.classes) != len(classes) or classes != numbered(len(classes)):  # numbers stand for any names
        check_classes(held_out.classes, classes, found="the data", expected="the checkpoint")
    announce_labels(held_out)
    return Evaluation(model, PixelMetrics(len(classes), config.data, config.test), held_out)


@torch.inference_mode()
def predict(
    checkpoint: Checkpoint, images: Sequence[str | Path], options: DrawingOptions, report: Report | None = None
) -> Iterator[Prediction]:
    """Classify pixels and draw them."""
    model, config, classes = load_segmenter(checkpoint)
    for path, picture, target in open_pictures(images, options.out, report):
        labels = probabilities(model, image_tensor(picture), config.data, config.test).argmax(0)
        save_drawing(draw_classes(picture, labels, classes), target)
        shares = torch.bincount(labels.flatten(), minlength=len(classes)) / labels.numel()
        present = sorted(((share, name) for share, name in zip(shares.tolist(), classes, strict=True) if share))[::-1]
        rows = [f"{share:7.2%}  {name}" for share, name in present]
        yield drawn(path, target, {"shares": {name: share for share, name in present}}, rows)


def exportable(checkpoint: Checkpoint, **changes: Any) -> tuple[nn.Module, dict[str, str]]:
    """The whole model, without its auxiliary head."""
    if checkpoint.native and changes:
        given = " ".join(f"--{option}" for option in changes)
        raise ValueError(f"{given}: expected nothing for a trained segmentation model, which says it itself")
    model, _, _ = load_segmenter(checkpoint, **changes)
    return MainScores(model).eval(), {"logits": "class scores (batch, classes, height, width)"}

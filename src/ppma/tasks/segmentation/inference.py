"""Evaluation, prediction and export of trained segmentation models."""

import os
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ppma.data.decoding import Report, image_files, read_images
from ppma.data.drawing import colour_of
from ppma.data.preprocessing import image_tensor
from ppma.data.segmentation import SegmentationImages
from ppma.data.source import check_classes
from ppma.engine.distributed import select_device
from ppma.models import Checkpoint
from ppma.tasks.base import Evaluation, Prediction
from ppma.tasks.dense.inference import data_configuration
from ppma.tasks.dense.overlay import OVERLAY, draw_classes, label_image
from ppma.tasks.prediction import PredictOptions, ResultFolder
from ppma.tasks.segmentation.metrics import PixelMetrics
from ppma.tasks.segmentation.model import MainScores
from ppma.tasks.segmentation.scoring import probabilities
from ppma.tasks.segmentation.weights import load_segmenter

LABELS, CLASSES = "_labels.png", "classes.txt"


def with_histogram(images: SegmentationImages) -> SegmentationImages:
    """Print the pixels of each class, in the main process; returns its argument."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(images.counts.lines(str(images.maps))), file=sys.stderr)
    return images


def evaluation(checkpoint: Checkpoint, data: str, split: str | None, assignments: Iterable[str]) -> Evaluation:
    """See `ppma.tasks.base.Task.evaluation`; `data` is a recipe or the folder of a data set."""
    model, stored, classes = load_segmenter(checkpoint)
    config = data_configuration(stored, "segmentation", data, assignments)
    held_out = SegmentationImages(config.data, split or config.data.test_split or config.data.split("val"))
    if checkpoint.native or len(held_out.classes) != len(classes):  # MMSegmentation abbreviates ADE20K's names
        check_classes(held_out.classes, classes, found="the data", expected="the checkpoint")
    return Evaluation(model, PixelMetrics(classes, config.data, config.test), with_histogram(held_out))


@torch.inference_mode()
def predict(
    checkpoint: Checkpoint, images: Sequence[str | Path], options: PredictOptions, report: Report | None = None
) -> Generator[Prediction, None, None]:
    """Segment images and compute the share of each class; see `ppma.tasks.base.Task.predict`.

    With `options.out`, STEM_labels.png has the class index of each pixel, with the classes' colours as its palette,
    STEM_overlay.png shows them on the image, and classes.txt has the names in the order of the indices.

    One image is computed at a time, because sizes differ.
    """
    device = select_device(options.device)
    paths, problems = image_files(images)
    folder = ResultFolder(options.out, paths, [LABELS, OVERLAY], [CLASSES], overwrite=options.overwrite)
    model, config, classes = load_segmenter(checkpoint)
    model.to(device)
    colours = checkpoint.palette or config.data.layout.palette or [colour_of(index) for index in range(len(classes))]
    folder.write(CLASSES, "".join(f"{name}\n" for name in classes).encode())
    for path, picture in read_images(paths, problems, report):
        labels = probabilities(model, image_tensor(picture).to(device), config.data, config.test).argmax(0).cpu()
        shares = torch.bincount(labels.flatten(), minlength=len(classes)) / labels.numel()
        present = sorted(((share, name) for share, name in zip(shares.tolist(), classes, strict=True) if share))[::-1]
        values: dict[str, Any] = {"image": str(path), "shares": {name: share for share, name in present}}
        if folder.path is not None:
            values["labels"] = folder.write_image(path, LABELS, label_image(labels, colours))
            values["overlay"] = folder.write_image(path, OVERLAY, draw_classes(picture, labels, classes, colours))
        yield Prediction(values, [str(path), *(f"  {share:7.2%}  {name}" for share, name in present)])


def exportable(checkpoint: Checkpoint, **changes: Any) -> tuple[nn.Module, dict[str, str]]:
    """The model without its auxiliary head, see `ppma.tasks.base.Task.exportable`."""
    if checkpoint.native and changes:
        given = " ".join(f"--{option}" for option in changes)
        raise ValueError(f"{given}: expected no such option for a file of `ppma train`, which has its own settings")
    model, _, _ = load_segmenter(checkpoint, **changes)
    return MainScores(model).eval(), {"logits": "class scores (batch, classes, height, width)"}

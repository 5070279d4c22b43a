"""Evaluating a trained detector on a data set, and running it on single images."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ppma.config import require
from ppma.data.coco import CocoInstances
from ppma.data.decoding import Report
from ppma.data.preprocessing import image_tensor
from ppma.models import Checkpoint
from ppma.tasks.base import Evaluation, Prediction
from ppma.tasks.dense.inference import (
    DrawingOptions,
    check_data_classes,
    data_configuration,
    drawn,
    open_pictures,
    save_drawing,
)
from ppma.tasks.dense.overlay import draw_instances
from ppma.tasks.detection.metrics import MASK_THRESHOLD, CocoMetrics
from ppma.tasks.detection.weights import load_detector


def evaluation(checkpoint: Checkpoint, data: str, split: str | None, assignments: Iterable[str]) -> Evaluation:
    """Set up the measurement of box and mask AP on a folder in COCO's layout; see `Task.evaluation`."""
    assignments = list(assignments)
    for assignment in assignments:
        if assignment.startswith("detector."):  # the model has been built
            raise ValueError(f"{assignment}: expected changes of data only, the checkpoint determines the detector")
    model, stored, classes = load_detector(checkpoint)
    config = data_configuration(stored, "detection", data, assignments)
    held_out = CocoInstances(config.data, split or config.data.val_split)
    check_data_classes(held_out.classes, classes)
    return Evaluation(model, CocoMetrics(), held_out)


@dataclass(frozen=True)
class PredictOptions(DrawingOptions):
    """Options of `ppma predict`.

    Attributes:
        threshold: minimum score of an instance.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.threshold <= 1, "threshold", "a number from 0 to 1", self.threshold)


@torch.inference_mode()
def predict(
    checkpoint: Checkpoint, images: Sequence[str | Path], options: PredictOptions, report: Report | None = None
) -> Iterator[Prediction]:
    """Detect instances and draw them; see `Task.predict`."""
    model, _, classes = load_detector(checkpoint)
    # Detections below the threshold suppress none above it, and each mask takes the memory of an image. The heads
    # compare with ">", hence the margin.
    model.roi_heads.score_thresh = max(model.roi_heads.score_thresh, options.threshold - 1e-4)
    for path, picture, target in open_pictures(images, options.out, report):
        (found,) = model([image_tensor(picture)])
        kept = found["scores"] >= options.threshold
        boxes, scores, labels = (found[key][kept] for key in ("boxes", "scores", "labels"))
        masks = found["masks"][kept, 0] >= MASK_THRESHOLD
        names = [classes[label - 1] for label in labels.tolist()]
        texts = [f"{name} {score:.2f}" for name, score in zip(names, scores.tolist(), strict=True)]
        save_drawing(draw_instances(picture, boxes, masks, labels.tolist(), texts), target)
        described = zip(names, scores.tolist(), boxes.tolist(), masks.sum((1, 2)).tolist(), strict=True)
        instances = [{"class": n, "score": s, "box": box, "pixels": area} for n, s, box, area in described]
        yield drawn(path, target, {"instances": instances}, _rows(instances))


def _rows(instances: list[dict[str, Any]]) -> list[str]:
    return [
        f"{one['score']:7.2%}  {one['class']}  box {', '.join(f'{x:.0f}' for x in one['box'])}" for one in instances
    ] or ["nothing found"]


def probe(checkpoint: Checkpoint, images: Tensor) -> Tensor:
    """Return the outputs (B, n) of all heads, of the image as a region, see `ppma.tasks.base.Task.probe`.

    They change little with rounding; which detections survive NMS may change.
    """
    model = load_detector(checkpoint)[0].to(images.dtype)
    levels, heads = model.backbone(images), model.roi_heads
    regions = [images.new_tensor([[0, 0, images.shape[-1], images.shape[-2]]])] * len(images)
    objectness, deltas = model.rpn.head(list(levels.values()))
    scores, boxes = heads.box_predictor(heads.box_head(heads.box_roi_pool(levels, regions)))
    masks = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(levels, regions)))
    return torch.cat([part.flatten(1) for part in (*objectness, *deltas, scores, boxes, masks)], 1)


def exportable(checkpoint: Checkpoint, **_: Any) -> NoReturn:
    """Refuse: detectors cannot be exported."""
    raise ValueError(
        f"{checkpoint.path}: expected a classifier or a segmentation model, got a detector; the number of detections "
        "depends on the image, which PyTorch cannot export. --backbone-only exports its backbone"
    )

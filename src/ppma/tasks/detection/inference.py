"""What a trained detector is used for: average precision on a data set, instances in single images."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ppma.data.classes import check_classes
from ppma.data.coco import CocoInstances
from ppma.data.decoding import Report
from ppma.data.pixels import image_tensor
from ppma.engine.evaluation import evaluate_model
from ppma.tasks.dense.overlay import draw_instances
from ppma.tasks.dense.use import data_configuration, open_pictures, save_drawing
from ppma.tasks.detection.metrics import SOLID, CocoMetrics
from ppma.tasks.detection.task import collate, load_detector


def evaluate_checkpoint(
    checkpoint: str | Path,
    data: str,
    *,
    split: str | None = None,
    assignments: Iterable[str] = (),
    batch_size: int = 4,
    **options: Any,
) -> dict[str, float]:
    """Average precision of boxes and masks.

    Args:
        checkpoint: a file of `ppma train`.
        data: a recipe, or a folder in COCO's layout.
        split: which part; `data.val_split` if None.
        assignments: `key=value` changes of the configuration.
        batch_size: for one process.
        options: of `evaluate_model`, such as `workers`.
    """
    model, stored, classes = load_detector(checkpoint)
    config = data_configuration(stored, data, assignments)
    held_out = CocoInstances(config.data, split or config.data.val_split)
    check_classes(held_out.classes, classes, found="the data", expected="the checkpoint")
    return evaluate_model(model, CocoMetrics(), held_out, collate, batch_size=batch_size, **options)


@torch.inference_mode()
def predict(
    checkpoint: str | Path,
    images: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    threshold: float = 0.5,
    report: Report | None = None,
) -> Iterator[dict[str, Any]]:
    """Find instances and draw them; gives plain values for each image as it is done.

    Args:
        checkpoint: a file of `ppma train`.
        images: paths; a folder stands for the images in it.
        out: see `open_pictures`.
        report: see `ppma.data.decoding.read_images`.
        threshold: instances with a lower score are left out.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold: expected a number from 0 to 1, got {threshold}")
    model, _, classes = load_detector(checkpoint)
    for path, picture, target in open_pictures(images, out, report):
        (found,) = model([image_tensor(picture)])
        kept = found["scores"] >= threshold
        boxes, scores, labels = (found[key][kept] for key in ("boxes", "scores", "labels"))
        masks = found["masks"][kept, 0] > SOLID
        names = [classes[label - 1] for label in labels.tolist()]
        texts = [f"{name} {score:.2f}" for name, score in zip(names, scores.tolist(), strict=True)]
        save_drawing(draw_instances(picture, boxes, masks, labels.tolist(), texts), target)
        described = zip(names, scores.tolist(), boxes.tolist(), masks.sum((1, 2)).tolist(), strict=True)
        instances = [{"class": n, "score": s, "box": box, "pixels": area} for n, s, box, area in described]
        yield {"image": path, "overlay": str(target), "instances": instances}


def rows(prediction: dict[str, Any]) -> list[str]:
    """What was found in one image, a line for each instance."""
    return [
        f"{one['score']:7.2%}  {one['class']}  box {', '.join(f'{x:.0f}' for x in one['box'])}"
        for one in prediction["instances"]
    ] or ["nothing found"]

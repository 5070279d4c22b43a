"""Evaluating a trained detector on a data set, and running it on single images."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ppma.config import require
from ppma.data.coco import CocoInstances
from ppma.data.decoding import Report, image_files, read_images
from ppma.data.preprocessing import image_tensor
from ppma.engine.distributed import select_device
from ppma.models import Checkpoint
from ppma.outputs import json_bytes
from ppma.tasks.base import Evaluation, Prediction
from ppma.tasks.dense.inference import check_data_classes, data_configuration
from ppma.tasks.dense.overlay import OVERLAY, draw_instances
from ppma.tasks.detection.coco_results import MASK_THRESHOLD, coco_results, look_up, number
from ppma.tasks.detection.metrics import CocoMetrics
from ppma.tasks.detection.weights import load_detector
from ppma.tasks.prediction import PredictOptions, ResultFolder

RESULTS, IMAGES = "predictions.json", "images.json"


def evaluation(checkpoint: Checkpoint, data: str, split: str | None, assignments: Iterable[str]) -> Evaluation:
    """Set up the measurement of box and mask AP on a folder in COCO's layout; see `Task.evaluation`."""
    assignments = list(assignments)
    for assignment in assignments:
        if assignment.startswith("detector."):  # the model has been built
            raise ValueError(f"{assignment}: expected changes of data only, the checkpoint determines the detector")
    model, stored, classes = load_detector(checkpoint)
    config = data_configuration(stored, "detection", data, assignments)
    masks = stored.detector.masks is not False
    held_out = CocoInstances(config.data, split or config.data.test_split or config.data.val_split, masks=masks)
    check_data_classes(held_out.classes, classes)
    return Evaluation(model, CocoMetrics(held_out.classes), held_out)


@dataclass(frozen=True)
class DetectOptions(PredictOptions):
    """Options of detection's `predict`.

    Attributes:
        threshold: minimum score of an instance.
        annotations: a file in COCO's format from which predictions.json takes the ids of images, by file name, and of
            categories, by class name; None to number both from 1, in the order of the images and of the classes.
    """

    threshold: float = 0.5
    annotations: str | None = None

    def __post_init__(self) -> None:
        require(0 <= self.threshold <= 1, "threshold", "a number from 0 to 1", self.threshold)


@torch.inference_mode()
def predict(
    checkpoint: Checkpoint, images: Sequence[str | Path], options: DetectOptions, report: Report | None = None
) -> Generator[Prediction, None, None]:
    """Detect instances; see `Task.predict`.

    With `options.out`, predictions.json has all instances in COCO's results format, images.json the images and
    categories that it refers to, and STEM_overlay.png shows the instances of an image.

    One image is computed at a time: in a batch, images are padded to one size, which changes the result.
    """
    device = select_device(options.device)
    paths, problems = image_files(images)
    folder = ResultFolder(options.out, paths, [OVERLAY], [RESULTS, IMAGES], overwrite=options.overwrite)
    model, _, classes = load_detector(checkpoint)
    model.to(device)
    # Detections below the threshold suppress none above it, and each mask takes the memory of an image. The heads
    # compare with ">", hence the margin.
    model.roi_heads.score_thresh = max(model.roi_heads.score_thresh, options.threshold - 1e-4)
    ids = number(paths, classes)
    if options.annotations is not None:
        ids = look_up(paths, classes, Path(options.annotations))
        problems += [f"{path}: not an image of {options.annotations}" for path in paths if path not in ids.images]
    results: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    try:
        for path, picture in read_images([*ids.images], problems, report):
            (found,) = model([image_tensor(picture).to(device)])
            found = {key: value[found["scores"] >= options.threshold].cpu() for key, value in found.items()}
            scores, outlined = found["scores"].tolist(), "masks" in found
            empty = torch.zeros(len(scores), picture.height, picture.width, dtype=torch.bool)
            masks = found["masks"][:, 0] >= MASK_THRESHOLD if outlined else empty
            names = [classes[label - 1] for label in found["labels"].tolist()]
            described = zip(names, scores, found["boxes"].tolist(), masks.sum((1, 2)).tolist(), strict=True)
            instances: list[dict[str, Any]] = [
                {"class": n, "score": s, "box": box} | ({"pixels": area} if outlined else {})
                for n, s, box, area in described
            ]
            values: dict[str, Any] = {"image": str(path), "instances": instances}
            if folder.path is not None:
                image_id = ids.images[path]
                results += coco_results(found, image_id, ids.categories)
                entries.append(
                    {"id": image_id, "file_name": str(path), "width": picture.width, "height": picture.height}
                )
                drawing = draw_instances(picture, found["boxes"], masks, names, scores)
                values["overlay"] = folder.write_image(path, OVERLAY, drawing)
            yield Prediction(values, [str(path), *_rows(instances)])
    finally:
        folder.write(RESULTS, json_bytes(results))
        categories = [{"id": i, "name": name} for i, name in zip(ids.categories, classes, strict=True)]
        folder.write(IMAGES, json_bytes({"images": entries, "categories": categories, "annotations": []}))


def _rows(instances: list[dict[str, Any]]) -> list[str]:
    return [
        f"  {one['score']:7.2%}  {one['class']}  box {', '.join(f'{x:.0f}' for x in one['box'])}" for one in instances
    ] or ["  nothing found"]


def probe(checkpoint: Checkpoint, images: Tensor) -> Tensor:
    """Return the outputs (B, n) of all heads, of the image as a region, see `ppma.tasks.base.Task.probe`.

    They change little with rounding; which detections survive NMS may change.
    """
    model = load_detector(checkpoint)[0].to(images.dtype)
    levels, heads = model.backbone(images), model.roi_heads
    regions = [images.new_tensor([[0, 0, images.shape[-1], images.shape[-2]]])] * len(images)
    objectness, deltas = model.rpn.head(list(levels.values()))
    scores, boxes = heads.box_predictor(heads.box_head(heads.box_roi_pool(levels, regions)))
    parts = [*objectness, *deltas, scores, boxes]
    if heads.has_mask():
        parts.append(heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(levels, regions))))
    return torch.cat([part.flatten(1) for part in parts], 1)


def exportable(checkpoint: Checkpoint, **_: Any) -> NoReturn:
    """Refuse: detectors cannot be exported."""
    raise ValueError(
        f"{checkpoint.path}: expected a classifier or a segmentation model, got a detector; the number of detections "
        "depends on the image, which PyTorch cannot export. --backbone-only exports its backbone"
    )

"""Average precision of boxes and masks, computed by pycocotools."""

import contextlib
import io
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from ppma.engine.task import Details, Metrics
from ppma.tasks.detection.coco_results import coco_results

_KINDS = {"box": "bbox", "mask": "segm"}
_STATISTICS = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")  # the first six that pycocotools computes

Truth = dict[str, Any]


class _Records(NamedTuple):
    images: list[dict[str, int]]
    category_ids: tuple[int, ...]
    annotations: list[dict[str, Any]]
    detections: list[dict[str, Any]]


class CocoMetrics(Metrics):
    """AP, AP50, AP75 and AP of small, medium and large objects in percent, for boxes and for masks.

    The ground truth comes with the batches, so only the images that were evaluated count. Sizes without any object
    have no entry.

    Args:
        classes: class names, in the order of `category_ids` of the batches.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = classes
        self.records = _Records([], (), [], [])
        self._evaluations: dict[str, COCOeval] = {}  # of `compute`, for `details`

    def update(self, model: nn.Module, batch: tuple[list[Tensor], list[Truth]]) -> None:
        images, truths = batch
        for image, found, truth in zip(images, model(images), truths, strict=True):
            self.records = self.records._replace(category_ids=truth["category_ids"])
            self.records.images.append({"id": truth["image_id"], "height": image.shape[1], "width": image.shape[2]})
            self.records.annotations.extend(truth["annotations"])
            self.records.detections.extend(coco_results(found, truth["image_id"], truth["category_ids"]))

    def state(self) -> _Records:
        return self.records

    def compute(self, states: Sequence[_Records]) -> dict[str, float]:
        annotations = [one for state in states for one in state.annotations]
        truth = COCO()
        truth.dataset = {
            "images": [image for state in states for image in state.images],
            # Renumbered from 1: pycocotools takes id 0 to mean "not matched".
            "annotations": [one | {"id": number} for number, one in enumerate(annotations, start=1)],
            "categories": [{"id": category} for category in sorted({c for s in states for c in s.category_ids})],
        }
        detections = [one for state in states for one in state.detections]
        measured: dict[str, float] = {}
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress and its table
            truth.createIndex()
            for name, kind in _KINDS.items():
                evaluation = self._evaluations[name] = _evaluate(truth, detections, kind)
                pairs = zip(_STATISTICS, evaluation.stats[: len(_STATISTICS)].tolist(), strict=True)
                # -1: no object of this size
                measured |= {f"{name}_{key}": 100 * value for key, value in pairs if value >= 0}
        return measured

    def details(self, states: Sequence[_Records]) -> Details:
        """The number of objects and the metrics of each class, and the detections in COCO's results format."""
        ids = next(state.category_ids for state in states if state.category_ids)
        counts = Counter(one["category_id"] for state in states for one in state.annotations if not one["iscrowd"])
        rows: list[dict[str, Any]] = []
        for name, category in zip(self.classes, ids, strict=True):
            row: dict[str, Any] = {"class": name, "count": counts[category]}
            for kind, evaluation in self._evaluations.items():
                values = _class_precisions(evaluation, category)
                row |= {f"{kind}_{key}": value for key, value in zip(_STATISTICS, values, strict=True)}
            rows.append(row)
        return Details(rows, predictions=[one for state in states for one in state.detections])


def _evaluate(truth: COCO, detections: list[dict[str, Any]], kind: str) -> COCOeval:
    """Evaluate one kind, "bbox" or "segm"."""
    other = {"bbox": "segmentation", "segm": "bbox"}[kind]  # pycocotools takes the area from the field that is left
    chosen = [{key: value for key, value in one.items() if key != other} for one in detections]
    # pycocotools cannot load an empty list of results
    results = truth.loadRes(chosen) if chosen else COCO()
    if not chosen:
        results.dataset = {**truth.dataset, "annotations": []}
        results.createIndex()
    evaluation = COCOeval(truth, results, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation


def _class_precisions(evaluation: COCOeval, category: int) -> list[float | None]:
    """The statistics of one class, in percent; None without objects."""
    # [IoU threshold, recall, class, size, number of detections]; the last: all detections
    precision = evaluation.eval["precision"][:, :, evaluation.params.catIds.index(category), :, -1]
    at50, at75 = (int(abs(evaluation.params.iouThrs - value).argmin()) for value in (0.5, 0.75))
    parts = [
        precision[..., 0],
        precision[at50, :, 0],
        precision[at75, :, 0],
        *(precision[..., size] for size in (1, 2, 3)),
    ]
    return [100 * float(part.mean()) if part.max() >= 0 else None for part in parts]  # -1 without objects

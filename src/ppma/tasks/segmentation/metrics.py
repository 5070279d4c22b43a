"""Intersection over union and pixel accuracy."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ppma.data.label_maps import IGNORED
from ppma.data.segmentation import SegmentationDataConfig
from ppma.engine.task import Details, Metrics
from ppma.tasks.report import percent
from ppma.tasks.segmentation.scoring import InferenceConfig, probabilities


class PixelMetrics(Metrics):
    """mIoU and mAcc (means over classes) and aAcc (over pixels), in percent, at the resolution of the label maps.

    Classes that occur neither in the labels nor in the predictions are left out of the means.

    Args:
        classes: class names.
        data: how images are resized.
        test: how images are segmented.
    """

    def __init__(self, classes: Sequence[str], data: SegmentationDataConfig, test: InferenceConfig) -> None:
        self.classes, self.data, self.test = classes, data, test
        self.confusion = torch.zeros(len(classes), len(classes), dtype=torch.int64)  # [label, prediction]

    def update(self, model: nn.Module, batch: tuple[list[Tensor], list[Tensor]]) -> None:
        for image, labels in zip(*batch, strict=True):
            self.add(probabilities(model, image, self.data, self.test).argmax(0), labels)

    def add(self, predicted: Tensor, labels: Tensor) -> None:
        """Count the pixels of one image.

        Args:
            predicted: (H, W), int64.
            labels: (H, W), int64.
        """
        labelled = labels != IGNORED
        pairs = labels[labelled] * len(self.classes) + predicted[labelled]
        self.confusion += torch.bincount(pairs, minlength=len(self.classes) ** 2).view_as(self.confusion).cpu()

    def state(self) -> Tensor:
        return self.confusion

    def compute(self, states: Sequence[Tensor]) -> dict[str, float]:
        confusion = torch.stack(list(states)).sum(0).double()
        correct, labelled, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        return {
            "mIoU": 100 * (correct / (labelled + predicted - correct)).nanmean().item(),
            "mAcc": 100 * (correct / labelled).nanmean().item(),
            "aAcc": 100 * (correct.sum() / labelled.sum()).item(),
        }

    def details(self, states: Sequence[Tensor]) -> Details:
        """The labelled pixels, IoU, accuracy (recall) and precision of each class, in percent."""
        confusion = torch.stack(list(states)).sum(0)
        correct, labelled, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        totals = (labelled + predicted - correct, labelled, predicted)
        columns = zip(self.classes, labelled.tolist(), *(percent(correct, total) for total in totals), strict=True)
        keys = ("class", "count", "IoU", "accuracy", "precision")
        return Details([dict(zip(keys, row, strict=True)) for row in columns], confusion)

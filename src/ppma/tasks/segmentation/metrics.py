"""Intersection over union, of regions and of their boundaries, and pixel accuracy."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppma.data.label_maps import IGNORED
from ppma.data.segmentation import SegmentationDataConfig
from ppma.engine.task import Details, Metrics
from ppma.tasks.report import percent
from ppma.tasks.segmentation.scoring import InferenceConfig, probabilities

BOUNDARY_WIDTH = 0.02  # of the image's diagonal, as Boundary IoU is defined (Cheng et al., CVPR 2021)


def boundary_band(labels: Tensor, width: int) -> Tensor:
    """The pixels at most `width` pixels from another label or from the outside of the image.

    Args:
        labels: (H, W), integers from 0.
        width: distance, along rows, columns or diagonals.

    Returns:
        (H, W), bool.

    Examples:
        >>> boundary_band(torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1]] * 9), 2)[4].int().tolist()
        [1, 1, 0, 0, 1, 1, 1, 1]
    """
    values = F.pad(labels.to(torch.float32)[None, None], (width,) * 4, value=-1.0)  # another label than any inside
    highest, lowest = values, -values
    for kernel in ((2 * width + 1, 1), (1, 2 * width + 1)):
        highest, lowest = (F.max_pool2d(pooled, kernel, stride=1) for pooled in (highest, lowest))
    return (highest != -lowest)[0, 0]


class PixelMetrics(Metrics):
    """mIoU and mAcc (means over classes) and aAcc (over pixels), in percent, at the resolution of the label maps.

    boundary_mIoU is the mean of Boundary IoU: the IoU of the pixels of each class that are near the class's boundary,
    in the labels and in the predictions.

    Classes that occur neither in the labels nor in the predictions are left out of the means.

    Args:
        classes: class names.
        data: how images are resized.
        test: how images are segmented.
    """

    def __init__(self, classes: Sequence[str], data: SegmentationDataConfig, test: InferenceConfig) -> None:
        self.classes, self.data, self.test = classes, data, test
        self.confusion = torch.zeros(len(classes), len(classes), dtype=torch.int64)  # [label, prediction]
        self.boundary = torch.zeros(2, len(classes), dtype=torch.int64)  # pixels of intersection and union

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
        width = max(1, round(BOUNDARY_WIDTH * math.hypot(*labels.shape)))
        true, found = (boundary_band(pixels, width) & labelled for pixels in (labels, predicted))
        both = true & found & (labels == predicted)
        counted = [self._count(labels[both]), self._count(labels[true]), self._count(predicted[found])]
        self.boundary += torch.stack([counted[0], counted[1] + counted[2] - counted[0]])

    def _count(self, labels: Tensor) -> Tensor:
        return torch.bincount(labels, minlength=len(self.classes)).cpu()

    def state(self) -> Tensor:
        return torch.cat([self.confusion, self.boundary])

    def _split(self, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The sums of confusion and of boundary pixels."""
        total = torch.stack(list(states)).sum(0)
        return total[:-2], total[-2:]

    def compute(self, states: Sequence[Tensor]) -> dict[str, float]:
        confusion, boundary = (part.double() for part in self._split(states))
        correct, labelled, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        return {
            "mIoU": 100 * (correct / (labelled + predicted - correct)).nanmean().item(),
            "boundary_mIoU": 100 * (boundary[0] / boundary[1]).nanmean().item(),
            "mAcc": 100 * (correct / labelled).nanmean().item(),
            "aAcc": 100 * (correct.sum() / labelled.sum()).item(),
        }

    def details(self, states: Sequence[Tensor]) -> Details:
        """The labelled pixels, IoU, accuracy (recall) and precision of each class, in percent."""
        confusion, _ = self._split(states)
        correct, labelled, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        totals = (labelled + predicted - correct, labelled, predicted)
        columns = zip(self.classes, labelled.tolist(), *(percent(correct, total) for total in totals), strict=True)
        keys = ("class", "count", "IoU", "accuracy", "precision")
        return Details([dict(zip(keys, row, strict=True)) for row in columns], confusion)

"""Intersection over union and accuracy of pixels."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ppma.data.ade20k import Ade20kDataConfig
from ppma.data.label_maps import IGNORED
from ppma.engine.task import Metrics
from ppma.tasks.segmentation.scoring import InferenceConfig, probabilities


class PixelMetrics(Metrics):
    """mIoU, mAcc (mean over classes) and aAcc (over pixels) in percent, at the size of the label maps.

    Classes that occur neither in the labels nor in the predictions do not count.

    Args:
        classes: how many.
        data: how images are scaled.
        test: how they are scored.
    """

    def __init__(self, classes: int, data: Ade20kDataConfig, test: InferenceConfig) -> None:
        self.classes, self.data, self.test = classes, data, test
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64)  # [label, prediction]

    def update(self, model: nn.Module, batch: tuple[list[Tensor], list[Tensor]]) -> None:
        for image, labels in zip(*batch, strict=True):
            self.note(probabilities(model, image, self.data, self.test).argmax(0), labels)

    def note(self, predicted: Tensor, labels: Tensor) -> None:
        """Count the pixels of one image, both (H, W)."""
        known = labels != IGNORED
        pairs = labels[known] * self.classes + predicted[known]
        self.confusion += torch.bincount(pairs, minlength=self.classes**2).view_as(self.confusion).cpu()

    def state(self) -> Tensor:
        return self.confusion

    def compute(self, states: Sequence[Tensor]) -> dict[str, float]:
        confusion = torch.stack(list(states)).sum(0).double()
        right, labelled, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        return {
            "mIoU": 100 * (right / (labelled + predicted - right)).nanmean().item(),
            "mAcc": 100 * (right / labelled).nanmean().item(),
            "aAcc": 100 * (right.sum() / labelled.sum()).item(),
        }

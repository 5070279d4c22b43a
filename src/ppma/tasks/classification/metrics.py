"""Accuracy and cross-entropy."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppma.engine.task import Details, Metrics
from ppma.tasks.report import percent


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Stack samples to images (B, 3, H, W) and labels (B,)."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


class ClassificationMetrics(Metrics):
    """Top-1 and top-5 accuracy in percent, and cross-entropy.

    Args:
        classes: class names.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = classes
        self.ranked: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.losses: list[Tensor] = []

    def update(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        scores = model(images).float()
        self.ranked.append(scores.topk(min(5, scores.shape[1])).indices.cpu())
        self.labels.append(labels.cpu())
        self.losses.append(F.cross_entropy(scores, labels, reduction="none").cpu())

    def state(self) -> tuple[Tensor, Tensor, Tensor] | None:
        return (torch.cat(self.ranked), torch.cat(self.labels), torch.cat(self.losses)) if self.labels else None

    def compute(self, states: Sequence[tuple[Tensor, Tensor, Tensor] | None]) -> dict[str, float]:
        ranked, labels, losses = _joined(states)
        right = ranked == labels[:, None]
        return {
            "top1": 100 * right[:, 0].double().mean().item(),
            "top5": 100 * right.any(1).double().mean().item(),
            "loss": losses.double().mean().item(),
        }

    def details(self, states: Sequence[tuple[Tensor, Tensor, Tensor] | None]) -> Details:
        """The accuracy (recall) and precision of each class, in percent."""
        ranked, labels, _ = _joined(states)
        size = len(self.classes)
        confusion = torch.bincount(labels * size + ranked[:, 0], minlength=size**2).view(size, size)
        correct, counts, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        columns = zip(self.classes, counts.tolist(), percent(correct, counts), percent(correct, predicted), strict=True)
        keys = ("class", "count", "accuracy", "precision")
        return Details([dict(zip(keys, row, strict=True)) for row in columns], confusion)


def _joined(states: Sequence[tuple[Tensor, Tensor, Tensor] | None]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*filter(None, states), strict=True)]

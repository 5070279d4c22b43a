"""Classification for the engine: model, data, loss, metrics."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.classifier import Preparation, classes_in, save_classifier
from ppma.data.classes import check_classes
from ppma.data.images import (
    TransformedImages,
    eval_transform,
    open_images,
    open_training_images,
    train_transform,
)
from ppma.data.source import ImageSource
from ppma.engine.task import Metrics, Task
from ppma.models import PolylineBackbone, load_checkpoint
from ppma.tasks.classification.config import ClassificationConfig


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Images (B, 3, H, W) and labels (B,)."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


class ClassificationMetrics(Metrics):
    """Top-1 and top-5 accuracy in percent, cross-entropy; keeps every prediction in order of evaluation."""

    def __init__(self) -> None:
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
        ranked, labels, losses = (torch.cat(parts) for parts in zip(*filter(None, states), strict=True))
        right = ranked == labels[:, None]
        return {
            "top1": 100 * right[:, 0].double().mean().item(),
            "top5": 100 * right.any(1).double().mean().item(),
            "loss": losses.double().mean().item(),
        }


class Classification(Task[ClassificationConfig]):
    """Training of a registered model on labelled images."""

    best = "top1"

    @functools.cached_property
    def source(self) -> ImageSource:
        """The training images."""
        return open_training_images(self.config.data)

    @functools.cached_property
    def mixing(self) -> Mixup | None:
        """Mixup and CutMix of whole batches, which also smooths the labels."""
        augment = self.config.augment
        if augment.mixup == 0 and augment.cutmix == 0:
            return None
        return Mixup(
            mixup_alpha=augment.mixup,
            cutmix_alpha=augment.cutmix,
            prob=augment.mix_prob,
            switch_prob=augment.mix_switch,
            label_smoothing=self.config.label_smoothing,
            num_classes=len(self.source.classes),
        )

    def model(self) -> nn.Module:
        classes = self.source.classes
        if self.config.init is None:
            return timm.create_model(self.config.model, num_classes=len(classes), **self.config.model_args)
        model = load_checkpoint(self.config.init, **self.config.model_args)
        if classes_in(self.config.init) != classes:
            warnings.warn(f"{self.config.init}: other classes than the data's, so the last layer is new", stacklevel=2)
            model.reset_classifier(len(classes))
        return model.train()

    def train_data(self) -> Dataset:
        return TransformedImages(self.source, train_transform(self.config.data, self.config.augment))

    def eval_data(self) -> Mapping[str, Dataset]:
        data, transform = self.config.data, eval_transform(self.config.data)
        splits = {"val": data.val_split} | ({"test": data.test_split} if data.test_split else {})
        opened = {}
        for name, split in splits.items():
            source = open_images(data, split)
            check_classes(source.classes, self.source.classes, found=f"split {split!r}", expected="the training data")
            opened[name] = TransformedImages(source, transform)
        return opened

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        return collate(samples)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        if self.mixing is None:
            scores = model(images)
            return {
                "cross_entropy": F.cross_entropy(scores.float(), labels, label_smoothing=self.config.label_smoothing)
            }
        images, soft = self.mixing(images, labels)
        return {"cross_entropy": F.cross_entropy(model(images).float(), soft)}

    def metrics(self) -> ClassificationMetrics:
        return ClassificationMetrics()

    def save_weights(self, model: nn.Module, path: Path) -> None:
        assert isinstance(model, PolylineBackbone)
        save_classifier(model, path, Preparation.of(self.config.data, self.source.classes))

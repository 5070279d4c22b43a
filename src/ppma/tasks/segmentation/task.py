"""Segmentation for the engine: model, data, loss, metrics."""

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.data.ade20k import Ade20kImages
from ppma.data.ade20k_transforms import train_transform
from ppma.data.label_maps import IGNORED
from ppma.engine.task import Task
from ppma.tasks.dense.weights import save_model, starting_backbone
from ppma.tasks.segmentation.config import SegmentationConfig
from ppma.tasks.segmentation.metrics import PixelMetrics
from ppma.tasks.segmentation.model import UPerNet


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Images and labels of their own sizes."""
    images, labels = zip(*samples, strict=True)
    return list(images), list(labels)


def pixel_loss(scores: Tensor, labels: Tensor, balance: float = 0.0) -> Tensor:
    """Cross-entropy, a mean over the labelled pixels, each with the weight of its class.

    Args:
        scores: (B, classes, H, W).
        labels: (B, H, W).
        balance: a class that has n pixels in this batch has the weight n ** -balance.
    """
    classes = scores.shape[1]
    pixels = torch.bincount(labels.where(labels != IGNORED, classes).flatten(), minlength=classes + 1)[:classes]
    weight = pixels.clamp(min=1).float() ** -balance
    total = F.cross_entropy(scores.float(), labels, weight, ignore_index=IGNORED, reduction="sum")
    return total / (weight * pixels).sum().clamp(min=torch.finfo(weight.dtype).tiny)  # 0 in a batch without any label


def announce_labels(images: Ade20kImages) -> Ade20kImages:
    """Print how much there is of each class, in one process of several; returns what was given."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(images.counts.lines(str(images.maps))), file=sys.stderr)
    return images


class Segmentation(Task[SegmentationConfig]):
    """Training of UPerNet on images with label maps."""

    best = "mIoU"

    @functools.cached_property
    def source(self) -> Ade20kImages:
        """The training images."""
        data = self.config.data
        return announce_labels(Ade20kImages(data, data.train_split, train_transform(data, self.config.augment)))

    def model(self) -> nn.Module:
        return UPerNet(starting_backbone(self.config), len(self.source.classes), self.config.decoder)

    def train_data(self) -> Dataset:
        return self.source

    def eval_data(self) -> Mapping[str, Dataset]:
        return {"val": announce_labels(Ade20kImages(self.config.data, self.config.data.val_split))}

    def collate(self, samples: list[Any]) -> Any:
        return collate(samples)

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[Tensor]]) -> dict[str, Tensor]:
        images, labels = (torch.stack(parts) for parts in batch)
        scores = model(images)
        weight, balance = self.config.decoder.auxiliary_weight, self.config.class_balance
        return {
            "decoder": pixel_loss(scores.main, labels, balance),
            "auxiliary": weight * pixel_loss(scores.auxiliary, labels, balance),
        }

    def metrics(self) -> PixelMetrics:
        return PixelMetrics(len(self.source.classes), self.config.data, self.config.test)

    def save_weights(self, model: nn.Module, path: Path) -> None:
        assert isinstance(model, UPerNet)
        save_model(model, path, model.backbone, "backbone.", self.config, self.source.classes)

"""Segmentation for the engine: model, data, loss, metrics."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.data.ade20k import Ade20kImages
from ppma.data.ade20k_transforms import train_transform
from ppma.data.label_maps import IGNORED
from ppma.tasks.base import Task
from ppma.tasks.dense.inference import DrawingOptions, collate
from ppma.tasks.dense.weights import save_model, starting_backbone
from ppma.tasks.segmentation import inference
from ppma.tasks.segmentation.config import SegmentationConfig
from ppma.tasks.segmentation.inference import announce_labels
from ppma.tasks.segmentation.metrics import PixelMetrics
from ppma.tasks.segmentation.model import UPerNet


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


class Segmentation(Task[SegmentationConfig]):
    """Training of UPerNet on images with label maps."""

    schema = SegmentationConfig
    predict_options = DrawingOptions
    monitor = "mIoU"
    backbone = "backbone"

    collate = staticmethod(collate)
    evaluation = staticmethod(inference.evaluation)
    predict = staticmethod(inference.predict)
    exportable = staticmethod(inference.exportable)

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

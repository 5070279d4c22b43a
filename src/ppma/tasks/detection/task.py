"""Detection for the engine: model, data, loss, metrics."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.data.classes import check_classes
from ppma.data.coco import CocoInstances
from ppma.data.coco_transforms import train_transform
from ppma.engine.task import Task
from ppma.models import PolylineBackbone, files
from ppma.tasks.dense.weights import checked_config, read_model, save_model, starting_backbone
from ppma.tasks.detection.config import DetectionConfig
from ppma.tasks.detection.metrics import CocoMetrics
from ppma.tasks.detection.model import PolylineMaskRCNN


def collate(samples: list[tuple[Tensor, Any]]) -> tuple[list[Tensor], list[Any]]:
    """Images of their own sizes, and what belongs to each."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def build(body: PolylineBackbone, config: DetectionConfig, classes: int) -> PolylineMaskRCNN:
    """The detector of a configuration, for so many classes beside the background."""
    return PolylineMaskRCNN(body, classes + 1, config.detector, config.data.mean, config.data.std)


class Detection(Task[DetectionConfig]):
    """Training of Mask R-CNN on images with instances."""

    best = "box_AP"

    @functools.cached_property
    def source(self) -> CocoInstances:
        """The training images."""
        return CocoInstances(self.config.data, self.config.data.train_split, train_transform(self.config.augment))

    def model(self) -> nn.Module:
        return build(starting_backbone(self.config), self.config, len(self.source.classes))

    def train_data(self) -> Dataset:
        return self.source

    def eval_data(self) -> Mapping[str, Dataset]:
        split = self.config.data.val_split
        held_out = CocoInstances(self.config.data, split)
        check_classes(held_out.classes, self.source.classes, found=f"split {split!r}", expected="the training data")
        return {"val": held_out}

    def collate(self, samples: list[Any]) -> Any:
        return collate(samples)

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Tensor]]]) -> dict[str, Tensor]:
        return model(*batch)

    def metrics(self) -> CocoMetrics:
        return CocoMetrics()

    def save_weights(self, model: nn.Module, path: Path) -> None:
        assert isinstance(model, PolylineMaskRCNN)
        save_model(model, path, model.backbone.body, "backbone.body.", self.config, self.source.classes)


def load_detector(path: str | Path) -> tuple[PolylineMaskRCNN, DetectionConfig, tuple[str, ...]]:
    """A trained detector, in evaluation mode, with its configuration and its classes."""
    stored = read_model(path, "detection")
    config = checked_config(DetectionConfig, stored, path)
    model = files.build(
        lambda: build(PolylineBackbone(stored.backbone), config, len(stored.classes)), stored.state, source=str(path)
    )
    return model, config, stored.classes

"""The detection task: model, data, loss and metrics for the trainer."""

import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.data.coco import CocoInstances
from ppma.data.coco_transforms import train_transform
from ppma.data.drawing import Panel, draw_instances, to_pixels
from ppma.data.source import check_classes
from ppma.tasks.base import Task
from ppma.tasks.dense.inference import collate
from ppma.tasks.dense.weights import starting_backbone
from ppma.tasks.detection import inference
from ppma.tasks.detection.config import DetectionConfig
from ppma.tasks.detection.metrics import CocoMetrics
from ppma.tasks.detection.model import PolylineMaskRCNN, cost
from ppma.tasks.detection.weights import convert_detector, make_detector, save_detector


class Detection(Task[DetectionConfig]):
    """Mask R-CNN on instance annotations."""

    schema = DetectionConfig
    predict_options = inference.DetectOptions
    monitor = "box_AP"
    backbone = "backbone.body"

    collate = staticmethod(collate)
    evaluation = staticmethod(inference.evaluation)
    predict = staticmethod(inference.predict)
    exportable = staticmethod(inference.exportable)
    convert = staticmethod(convert_detector)
    probe = staticmethod(inference.probe)

    @functools.cached_property
    def source(self) -> CocoInstances:
        """The training split."""
        return CocoInstances(self.config.data, self.config.data.train_split, train_transform(self.config.augment))

    def model(self) -> nn.Module:
        return make_detector(starting_backbone(self.config), self.config, len(self.source.classes))

    def train_data(self) -> Dataset:
        return self.source

    def eval_data(self) -> Mapping[str, Dataset]:
        split = self.config.data.val_split
        held_out = CocoInstances(self.config.data, split)
        check_classes(held_out.classes, self.source.classes, found=f"split {split!r}", expected="the training data")
        return {"val": held_out}

    def draw(self, sample: tuple[Tensor, dict[str, Any]]) -> Panel:
        image, target = sample
        names = [self.source.classes[label - 1] for label in target["labels"].tolist()]
        picture = draw_instances(to_pixels(image), target["boxes"], target["masks"], names)
        return picture, ", ".join(f"{name}: {count}" for name, count in Counter(names).items())

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Tensor]]]) -> dict[str, Tensor]:
        return model(*batch)

    def macs(self, model: nn.Module) -> int:
        assert isinstance(model, PolylineMaskRCNN)
        chosen = self.config.detector
        return cost(model, (chosen.short_side,) * 2, proposals=chosen.proposals, masks=chosen.detections).macs

    def example(self, batch: int) -> list[Tensor]:
        return list(torch.rand(batch, 3, self.config.detector.short_side, self.config.detector.short_side))

    def metrics(self) -> CocoMetrics:
        return CocoMetrics(self.source.classes)

    def save_weights(self, model: nn.Module, path: Path) -> None:
        assert isinstance(model, PolylineMaskRCNN)
        save_detector(model, path, self.config, self.source.classes)

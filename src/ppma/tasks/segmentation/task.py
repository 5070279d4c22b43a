"""Training of UPerNet: model, data, loss, metrics."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.data.drawing import Panel, draw_labels, to_pixels
from ppma.data.segmentation import SegmentationImages, class_names
from ppma.data.segmentation_transforms import train_transform
from ppma.ops import checks
from ppma.tasks.base import Task
from ppma.tasks.dense.inference import collate
from ppma.tasks.dense.weights import starting_backbone
from ppma.tasks.segmentation import inference
from ppma.tasks.segmentation.config import SegmentationConfig
from ppma.tasks.segmentation.inference import with_histogram
from ppma.tasks.segmentation.losses import dice_loss, pixel_loss
from ppma.tasks.segmentation.metrics import PixelMetrics
from ppma.tasks.segmentation.model import UPerNet, cost
from ppma.tasks.segmentation.weights import convert_segmenter, save_segmenter


class Segmentation(Task[SegmentationConfig]):
    """Training of UPerNet on images with label maps."""

    schema = SegmentationConfig
    monitor = "mIoU"
    backbone = "backbone"

    collate = staticmethod(collate)
    evaluation = staticmethod(inference.evaluation)
    predict = staticmethod(inference.predict)
    exportable = staticmethod(inference.exportable)
    convert = staticmethod(convert_segmenter)

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return class_names(self.config.data)

    def model(self) -> nn.Module:
        return UPerNet(starting_backbone(self.config), len(self.classes), self.config.decoder)

    def _open(self, part: Literal["train", "val"]) -> SegmentationImages:
        data = self.config.data
        transform = train_transform(data, self.config.augment) if part == "train" else None
        return SegmentationImages(data, data.split(part), transform)

    def train_data(self) -> Dataset:
        return with_histogram(self._open("train"))

    def eval_data(self) -> Mapping[str, Dataset]:
        data = self.config.data
        splits = {"val": data.split("val")} | ({"test": data.test_split} if data.test_split else {})
        return {name: with_histogram(SegmentationImages(data, split)) for name, split in splits.items()}

    def checked_data(self) -> dict[str, SegmentationImages]:
        return {"train": self._open("train"), "val": self._open("val")}

    def draw(self, sample: tuple[Tensor, Tensor]) -> Panel:
        data, (image, labels) = self.config.data, sample
        pixels = to_pixels(image, data.mean, data.std)
        shares = torch.bincount(labels.flatten(), minlength=len(self.classes))[: len(self.classes)] / labels.numel()
        present = sorted(zip(shares.tolist(), self.classes, strict=True), reverse=True)
        caption = ", ".join(f"{share:.0%} {name}" for share, name in present if share)
        return draw_labels(pixels, labels, self.classes, data.layout.palette), caption

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[Tensor]]) -> dict[str, Tensor]:
        images, labels = (torch.stack(parts) for parts in batch)
        scores = model(images)
        return {
            "decoder": self._loss(scores.main, labels),
            "auxiliary": self.config.decoder.auxiliary_weight * self._loss(scores.auxiliary, labels),
        }

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        config, terms = self.config, []
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(scores.device)  # once: the copy waits for a GPU
        if config.loss != "dice":
            gamma = config.focal_gamma if config.loss == "focal" else 0.0
            options: dict[str, Any] = {"weights": self.class_weights, "gamma": gamma}
            terms.append(pixel_loss(scores, labels, config.class_balance, config.loss_mean, **options))
        if config.loss in ("dice", "combination"):
            terms.append(dice_loss(scores, labels, self.class_weights))
        return torch.stack(terms).sum()

    @functools.cached_property
    def class_weights(self) -> Tensor | None:
        """The factor of each class in the loss, (classes,); None without any."""
        given = self.config.class_weights
        for name in given:
            checks.one_of("class_weights", name, self.classes)
        return torch.tensor([float(given.get(name, 1)) for name in self.classes]) if given else None

    def macs(self, model: nn.Module) -> int:
        assert isinstance(model, UPerNet)
        return cost(model, (self.config.augment.crop,) * 2).macs

    def example(self, batch: int) -> Tensor:
        return torch.randn(batch, 3, self.config.augment.crop, self.config.augment.crop)

    def metrics(self) -> PixelMetrics:
        return PixelMetrics(self.classes, self.config.data, self.config.test)

    def save_weights(self, model: nn.Module, path: Path) -> None:
        assert isinstance(model, UPerNet)
        save_segmenter(model, path, self.config, self.classes)

"""Training of UPerNet: model, data, loss, metrics."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.data.drawing import Panel, draw_labels, to_pixels
from ppma.data.label_maps import IGNORED
from ppma.data.segmentation import SegmentationImages, class_names
from ppma.data.segmentation_transforms import train_transform
from ppma.tasks.base import Task
from ppma.tasks.dense.inference import collate
from ppma.tasks.dense.weights import starting_backbone
from ppma.tasks.segmentation import inference
from ppma.tasks.segmentation.config import SegmentationConfig
from ppma.tasks.segmentation.inference import with_histogram
from ppma.tasks.segmentation.metrics import PixelMetrics
from ppma.tasks.segmentation.model import UPerNet, cost
from ppma.tasks.segmentation.weights import convert_segmenter, save_segmenter


def pixel_loss(scores: Tensor, labels: Tensor, balance: float = 0.0, mean: str = "labelled") -> Tensor:
    """Cross-entropy of pixels, averaged with a weight for each class.

    Args:
        scores: (B, classes, H, W), logits.
        labels: (B, H, W), int64.
        balance: a class with n pixels in the batch has the weight n ** -balance.
        mean: average over the "labelled" pixels, or over "all".
    """
    classes = scores.shape[1]
    pixels = torch.bincount(labels.where(labels != IGNORED, classes).flatten(), minlength=classes + 1)[:classes]
    weight = pixels.clamp(min=1).float() ** -balance
    total = F.cross_entropy(scores.float(), labels, weight, ignore_index=IGNORED, reduction="sum")
    average = total / (weight * pixels).sum().clamp(min=torch.finfo(weight.dtype).tiny)  # 0 without labels
    return average * (pixels.sum() / labels.numel()) if mean == "all" else average


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
        return {"val": with_histogram(self._open("val"))}

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
        balance, mean = self.config.class_balance, self.config.loss_mean
        return {
            "decoder": pixel_loss(scores.main, labels, balance, mean),
            "auxiliary": self.config.decoder.auxiliary_weight * pixel_loss(scores.auxiliary, labels, balance, mean),
        }

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

"""The classification task: model, data, loss and metrics."""

import dataclasses
import difflib
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

from ppma.config import require
from ppma.data.drawing import Panel, draw_image, to_pixels
from ppma.data.images import (
    TransformedImages,
    open_images,
    open_training_images,
    train_transform,
)
from ppma.data.preprocessing import Preprocessing
from ppma.data.source import ImageSource, check_classes
from ppma.models import CONFIGS, open_checkpoint, save_checkpoint
from ppma.models.loading import load_model
from ppma.models.profile import count_macs
from ppma.models.timm_models import TimmModel
from ppma.tasks.base import Task
from ppma.tasks.classification import inference
from ppma.tasks.classification.config import ClassificationConfig
from ppma.tasks.classification.metrics import ClassificationMetrics, collate


class Classification(Task[ClassificationConfig]):
    """Training of a classifier on labelled images."""

    schema = ClassificationConfig
    predict_options = inference.ClassifyOptions
    preprocessing_keys = tuple(field.name for field in dataclasses.fields(Preprocessing))
    eval_batch_size = 64
    monitor = "top1"

    collate = staticmethod(collate)
    evaluation = staticmethod(inference.evaluation)
    predict = staticmethod(inference.predict)
    exportable = staticmethod(inference.exportable)

    @functools.cached_property
    def source(self) -> ImageSource:
        """The training images, before any transform."""
        source = open_training_images(self.config.data)
        for name in map(str, self.config.class_weights):
            near = difflib.get_close_matches(name, source.classes, n=1, cutoff=0.4)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            require(name in source.classes, "class_weights", f"one of the {len(source.classes)} classes{hint}", name)
        return source

    @functools.cached_property
    def mixing(self) -> Mixup | None:
        """Mixup and CutMix of a batch, including label smoothing; None if both are off."""
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
        config, classes = self.config, self.source.classes
        if config.start is None and config.model in CONFIGS:
            return timm.create_model(config.model, num_classes=len(classes), **config.model_args)
        if config.start is None:
            chosen = TimmModel(config.model, config.model_args)
            return chosen.classifier(len(classes), config.data.image_size, pretrained=config.pretrained)
        start = open_checkpoint(config.start)
        model: Any = load_model(start, **config.start_args(start))
        if start.larger or start.classes != classes:
            warnings.warn(f"{config.start}: its classes differ from the data's, so the last layer is new", stacklevel=2)
            model.reset_classifier(len(classes))
        return model.train()

    def train_data(self) -> Dataset:
        return TransformedImages(self.source, train_transform(self.config.data, self.config.augment))

    def eval_data(self) -> Mapping[str, Dataset]:
        data, transform = self.config.data, Preprocessing.from_config(self.config.data).transform()
        splits = {"val": data.val_split} | ({"test": data.test_split} if data.test_split else {})
        opened = {}
        for name, split in splits.items():
            source = open_images(data, split)
            check_classes(source.classes, self.source.classes, found=f"split {split!r}", expected="the training data")
            opened[name] = TransformedImages(source, transform)
        return opened

    def sample_weights(self) -> Sequence[float] | None:
        if not self.config.balanced_sampling:
            return None
        return (1 / self._counts())[self.source.labels()].tolist()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        if self.mixing is None:
            targets, smoothing = labels, self.config.label_smoothing
        else:
            (images, targets), smoothing = self.mixing(images, labels), 0.0  # already in the targets
        scores = model(images).float()
        if self.class_weights is None:
            return {"cross_entropy": F.cross_entropy(scores, targets, label_smoothing=smoothing)}
        weights = self.class_weights = self.class_weights.to(scores.device)
        losses = F.cross_entropy(scores, targets, label_smoothing=smoothing, reduction="none")
        return {"cross_entropy": (losses * (weights[targets] if self.mixing is None else targets @ weights)).mean()}

    @functools.cached_property
    def class_weights(self) -> Tensor | None:
        """The weight of each class in the loss, (classes,), 1 on average over the images; None without weights."""
        config, classes = self.config, self.source.classes
        if not config.class_weights and config.class_balance == 0:
            return None
        counts = self._counts()
        given = {str(name): float(weight) for name, weight in config.class_weights.items()}  # YAML reads 0: as a number
        factors = torch.tensor([given.get(name, 1.0) for name in classes], dtype=torch.float64)
        weights = factors * counts**-config.class_balance
        mean = (weights * counts).sum() / len(self.source)
        require(mean.item() > 0, "class_weights", "a class with images and a weight > 0", config.class_weights)
        return (weights / mean).float()

    def _counts(self) -> Tensor:
        """Training images of each class, (classes,), float64; at least 1, for classes without images."""
        labels = torch.as_tensor(self.source.labels())
        return torch.bincount(labels, minlength=len(self.source.classes)).clamp(min=1).double()

    def draw(self, sample: tuple[Tensor, int]) -> Panel:
        image, label = sample
        return draw_image(to_pixels(image, self.config.data.mean, self.config.data.std)), self.source.classes[label]

    def macs(self, model: nn.Module) -> int:
        return count_macs(model, (self.config.data.image_size,) * 2)

    def example(self, batch: int) -> Tensor:
        return torch.randn(batch, 3, self.config.data.image_size, self.config.data.image_size)

    def metrics(self) -> ClassificationMetrics:
        return ClassificationMetrics(self.source.classes)

    def save_weights(self, model: nn.Module, path: Path) -> None:
        preprocessing = Preprocessing.from_config(self.config.data)
        save_checkpoint(model, path, preprocessing=preprocessing, classes=self.source.classes)

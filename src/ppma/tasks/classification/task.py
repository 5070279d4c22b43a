"""The classification task: model, data, loss and metrics."""

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path

import timm
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.data.images import (
    TransformedImages,
    open_images,
    open_training_images,
    train_transform,
)
from ppma.data.preprocessing import Preprocessing
from ppma.data.source import ImageSource, check_classes
from ppma.models import PolylineBackbone, load_checkpoint, open_checkpoint, save_checkpoint
from ppma.tasks.base import Task
from ppma.tasks.classification import inference
from ppma.tasks.classification.config import ClassificationConfig
from ppma.tasks.classification.metrics import ClassificationMetrics, collate


class Classification(Task[ClassificationConfig]):
    """Training of a classifier on labelled images."""

    schema = ClassificationConfig
    predict_options = inference.PredictOptions
    eval_batch_size = 64
    monitor = "top1"

    collate = staticmethod(collate)
    evaluation = staticmethod(inference.evaluation)
    predict = staticmethod(inference.predict)
    exportable = staticmethod(inference.exportable)

    @functools.cached_property
    def source(self) -> ImageSource:
        """The training images, before any transform."""
        return open_training_images(self.config.data)

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
        classes = self.source.classes
        if self.config.init is None:
            return timm.create_model(self.config.model, num_classes=len(classes), **self.config.model_args)
        start = open_checkpoint(self.config.init)
        model = load_checkpoint(start, **self.config.model_args)
        if start.larger or start.classes != classes:
            warnings.warn(
                f"{self.config.init}: its classes differ from the data's, so the last layer is new", stacklevel=2
            )
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
        preprocessing = Preprocessing.from_config(self.config.data)
        save_checkpoint(model, path, preprocessing=preprocessing, classes=self.source.classes)

"""The configuration of classification runs."""

from dataclasses import dataclass, field
from typing import Any

from ppma.config import ConfigError, require
from ppma.data.images import AugmentConfig, ImageDataConfig, train_transform
from ppma.tasks.model_config import ModelConfig, require_weights

LARGEST_IMAGE = 4096  # a larger size is a typing mistake that would exhaust memory


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(ModelConfig):
    """The configuration of a classification run.

    Attributes:
        data: see `ImageDataConfig`.
        augment: see `AugmentConfig`.
        label_smoothing: fraction of the target that is spread over all classes.
        class_balance: weight of a class in the loss, as the power of its inverse frequency in the training images: 0
            weighs every image equally, 1 every class.
        class_weights: further factors on the weights of classes, by name; 1 for those not named.
        balanced_sampling: whether an epoch draws every class equally often, with replacement.
    """

    data: ImageDataConfig
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    label_smoothing: float = 0.0
    class_balance: float = 0.0
    class_weights: dict[str, Any] = field(default_factory=dict)
    balanced_sampling: bool = False

    def __post_init__(self) -> None:
        require("num_classes" not in self.model_args, "model_args.num_classes", "nothing: the data set it", "a value")
        super().__post_init__()
        for key in ("mixup", "cutmix"):
            require(getattr(self.augment, key) >= 0, f"augment.{key}", "0 or more", getattr(self.augment, key))
        size = self.data.image_size / self.data.crop_pct
        expected = f"images resized to at most {LARGEST_IMAGE} pixels"
        require(size <= LARGEST_IMAGE, "data.image_size, data.crop_pct", expected, size)
        require(0 <= self.label_smoothing < 1, "label_smoothing", "a number in [0, 1)", self.label_smoothing)
        require(0 <= self.class_balance <= 1, "class_balance", "a number in [0, 1]", self.class_balance)
        require_weights(self.class_weights)
        try:
            train_transform(self.data, self.augment)
        except Exception as error:  # timm parses auto_augment with assertions
            raise ConfigError(f"augment: expected settings that timm accepts: {error}") from None
        mixes = self.augment.mixup > 0 or self.augment.cutmix > 0
        micro = self.batch_size // self.accumulate
        require(not mixes or micro % 2 == 0, "batch_size", "an even micro-batch, for mixup and cutmix", micro)

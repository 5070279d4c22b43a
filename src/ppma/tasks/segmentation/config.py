"""The schema of segmentation recipes."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ppma.config import require
from ppma.data.segmentation import MAX_SIDE, SegmentationDataConfig
from ppma.data.segmentation_transforms import SegmentationAugmentConfig
from ppma.tasks.dense.config import DenseConfig
from ppma.tasks.model_config import require_weights
from ppma.tasks.segmentation.model import DecoderConfig
from ppma.tasks.segmentation.scoring import InferenceConfig


def _require_sizes(data: SegmentationDataConfig, key: str, factors: tuple[float, ...]) -> None:
    """Refuse factors that make an image larger than any GPU can hold."""
    side = data.long_side * max(factors)
    require(side <= MAX_SIDE, key, f"at most {MAX_SIDE} pixels, data.long_side times the largest factor", side)


@dataclass(frozen=True)
class ScoringConfig:
    """How a trained model segments images: the fields of `SegmentationConfig` that evaluation needs.

    Attributes:
        data: see `SegmentationDataConfig`.
        decoder: see `DecoderConfig`.
        test: see `InferenceConfig`.
    """

    data: SegmentationDataConfig
    decoder: DecoderConfig
    test: InferenceConfig

    def __post_init__(self) -> None:
        _require_sizes(self.data, "test.scales", self.test.scales)


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig(DenseConfig):
    """A run that trains UPerNet.

    Attributes:
        data: see `SegmentationDataConfig`.
        augment: see `SegmentationAugmentConfig`.
        decoder: see `DecoderConfig`.
        test: see `InferenceConfig`.
        loss: "cross_entropy", "focal", "dice", or the "combination" of cross-entropy and dice, their sum.
        focal_gamma: exponent of the focal loss: pixels with probability p of their class have the factor (1 - p) **
            gamma.
        class_weights: factors on the weights of classes in the loss, by name; 1 for those not named.
        class_balance: exponent in [0, 1]. A class with n pixels in the batch has the weight n ** -class_balance in the
            loss: 0 weighs all pixels equally, 1 all classes. Not for the dice loss, which weighs all classes equally.
        loss_mean: average the loss over the "labelled" pixels, or over "all", ignored ones included, as MMSegmentation.
    """

    data: SegmentationDataConfig
    augment: SegmentationAugmentConfig = field(default_factory=SegmentationAugmentConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    test: InferenceConfig = field(default_factory=InferenceConfig)
    loss: Literal["cross_entropy", "focal", "dice", "combination"] = "cross_entropy"
    focal_gamma: float = 2.0
    class_weights: dict[str, Any] = field(default_factory=dict)
    class_balance: float = 0.0
    loss_mean: Literal["labelled", "all"] = "labelled"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.focal_gamma >= 0, "focal_gamma", "0 or more", self.focal_gamma)
        require_weights(self.class_weights)
        require(0 <= self.class_balance <= 1, "class_balance", "a number in [0, 1]", self.class_balance)
        _require_sizes(self.data, "augment.ratio", self.augment.ratio)
        _require_sizes(self.data, "test.scales", self.test.scales)
        micro = self.batch_size // self.accumulate
        require(micro >= 2, "batch_size", "a micro-batch of 2 or more, for the batch norm of one pooled pixel", micro)

"""The schema of segmentation's configuration files."""

from dataclasses import dataclass, field

from ppma.config import require
from ppma.data.ade20k import Ade20kDataConfig
from ppma.data.ade20k_transforms import Ade20kAugmentConfig
from ppma.tasks.dense.config import DenseConfig
from ppma.tasks.segmentation.model import DecoderConfig
from ppma.tasks.segmentation.scoring import InferenceConfig


@dataclass(frozen=True)
class ScoringConfig:
    """How a trained model scores images: the parts of `SegmentationConfig` that evaluation needs.

    Attributes:
        data: see `Ade20kDataConfig`.
        test: see `InferenceConfig`.
    """

    data: Ade20kDataConfig
    test: InferenceConfig


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig(DenseConfig):
    """Training of UPerNet.

    Attributes:
        data: see `Ade20kDataConfig`.
        augment: see `Ade20kAugmentConfig`.
        decoder: see `DecoderConfig`.
        test: see `InferenceConfig`.
        class_balance: weight of a class in the loss, as power of its pixels in the batch: 0 counts every pixel alike, 1
            every class. Above 0 a ground that fills most of an image does not drown the rest.
    """

    data: Ade20kDataConfig
    augment: Ade20kAugmentConfig = field(default_factory=Ade20kAugmentConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    test: InferenceConfig = field(default_factory=InferenceConfig)
    class_balance: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.class_balance <= 1, "class_balance", "a number in [0, 1]", self.class_balance)
        micro = self.batch_size // self.accumulate
        require(micro >= 2, "batch_size", "a micro-batch of 2 or more, for the batch norm of one pooled pixel", micro)

"""UPerNet over our backbones, with the heads of transformers, which have MMSegmentation's structure."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import UperNetConfig
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from ppma.config import require
from ppma.tasks.dense.backbone import (
    Backbone,
    authors_without_weight_decay,
    dense_backbone,
    feature_channels,
    features,
    without_weight_decay,
)
from ppma.tasks.dense.cost import Cost, count

AUXILIARY_STAGE = 2
MAX_CHANNELS = 1 << 14


@dataclass(frozen=True)
class DecoderConfig:
    """The heads of UPerNet.

    Attributes:
        channels: channels of the decoder.
        pool_scales: grid sizes of the pyramid pooling.
        auxiliary_channels: channels of the auxiliary head on the third stage, which is used in training only.
        auxiliary_weight: weight of the auxiliary loss.
        dropout: probability of dropping a channel before the classifiers.
        classifier_std: standard deviation of the classifiers' initial weights. MMSegmentation's 0.01 makes all classes
            start with nearly the same scores, which only a pretrained backbone overcomes quickly.
    """

    channels: int = 512
    pool_scales: tuple[int, ...] = (1, 2, 3, 6)
    auxiliary_channels: int = 256
    auxiliary_weight: float = 0.4
    dropout: float = 0.1
    classifier_std: float = 0.01

    def __post_init__(self) -> None:
        for key in ("channels", "auxiliary_channels"):
            require(1 <= getattr(self, key) <= MAX_CHANNELS, key, f"1 to {MAX_CHANNELS}", getattr(self, key))
        require(1 <= len(self.pool_scales) <= 64, "pool_scales", "1 to 64 numbers", self.pool_scales)
        valid = all(1 <= scale <= 1024 for scale in self.pool_scales)
        require(valid, "pool_scales", "numbers from 1 to 1024", self.pool_scales)
        require(self.auxiliary_weight >= 0, "auxiliary_weight", "0 or more", self.auxiliary_weight)
        require(0 <= self.dropout < 1, "dropout", "a number in [0, 1)", self.dropout)
        require(self.classifier_std >= 0, "classifier_std", "0 or more", self.classifier_std)


class Scores(NamedTuple):
    """Logits of every pixel.

    Attributes:
        main: (B, classes, height, width).
        auxiliary: those of the auxiliary head, of the same shape; None in evaluation mode.
    """

    main: Tensor
    auxiliary: Tensor | None


class UPerNet(nn.Module):
    """Semantic segmentation of normalised images.

    Args:
        backbone: returns the features of four stages.
        num_classes: number of classes.
        decoder: see `DecoderConfig`.
    """

    def __init__(self, backbone: Backbone, num_classes: int, decoder: DecoderConfig) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes: expected at least 2, got {num_classes}")
        self.num_classes = num_classes
        self.backbone = backbone
        settings = UperNetConfig(
            hidden_size=decoder.channels,
            pool_scales=list(decoder.pool_scales),
            auxiliary_channels=decoder.auxiliary_channels,
        )
        settings.num_labels = num_classes
        channels = list(feature_channels(backbone))
        self.decode_head = UperNetHead(settings, channels)
        self.auxiliary_head = UperNetFCNHead(settings, channels, in_index=AUXILIARY_STAGE)
        for head in (self.decode_head, self.auxiliary_head):
            _initialise(head, decoder.classifier_std)
            head.add_module("classifier", nn.Sequential(nn.Dropout2d(decoder.dropout), head.classifier))

    def forward(self, images: Tensor) -> Scores:
        """Logits, at full resolution, of images (B, 3, height, width)."""
        stages = features(self.backbone, images)
        main = _upsample(self.decode_head(stages), images)
        return Scores(main, _upsample(self.auxiliary_head(stages), images) if self.training else None)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay, see `PolylineBackbone.no_weight_decay`."""
        return without_weight_decay(self.backbone, "backbone.")

    def authors_no_weight_decay(self) -> set[str]:
        """Names of the parameters that the authors' training excludes from weight decay."""
        return authors_without_weight_decay(self.backbone, "backbone.")


class MainScores(nn.Module):
    """A segmentation model with a single tensor as output, for exporters.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: UPerNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes, height, width) of images (B, 3, height, width)."""
        return self.model(images).main


def _upsample(scores: Tensor, images: Tensor) -> Tensor:
    return F.interpolate(scores, size=images.shape[-2:], mode="bilinear", align_corners=False)


def _initialise(head: UperNetHead | UperNetFCNHead, classifier_std: float) -> None:
    """Initialise a head as MMSegmentation does; transformers keeps PyTorch's defaults."""
    for module in head.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:  # only the classifier has a bias: the others are followed by a norm
                nn.init.normal_(module.weight, std=classifier_std)
                nn.init.zeros_(module.bias)


def upernet(
    backbone_name: str,
    num_classes: int = 150,
    *,
    decoder: DecoderConfig | None = None,
    **backbone_kwargs: Any,
) -> UPerNet:
    """UPerNet over a registered backbone.

    Args:
        backbone_name: a key of `ppma.models.CONFIGS`, such as "ppma_tiny".
        num_classes: number of classes; ADE20K has 150.
        decoder: see `DecoderConfig`.
        backbone_kwargs: fields of `BackboneConfig` to override.

    Examples:
        >>> import torch
        >>> from ppma.tasks.segmentation import upernet
        >>> model = upernet("ppma_nano", num_classes=11).eval()
        >>> model(torch.randn(1, 3, 64, 96)).main.shape
        torch.Size([1, 11, 64, 96])
    """
    return UPerNet(dense_backbone(backbone_name, **backbone_kwargs), num_classes, decoder or DecoderConfig())


def cost(model: UPerNet, size: tuple[int, int] = (512, 2048)) -> Cost:
    """Multiply-adds for one image of `size` (height, width)."""
    return count(model, lambda shadow: shadow(torch.empty(1, 3, *size, device="meta")))

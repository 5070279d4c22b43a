"""UPerNet over our backbones: the heads are transformers', which are MMSegmentation's in structure."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import UperNetConfig
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from ppma.config import require
from ppma.models import PolylineBackbone
from ppma.tasks.dense.backbone import dense_backbone, feature_channels, features, without_weight_decay
from ppma.tasks.dense.cost import Cost, count

AUXILIARY_STAGE = 2


@dataclass(frozen=True)
class DecoderConfig:
    """The heads of UPerNet.

    Attributes:
        channels: of the decoder.
        pool_scales: grids of its pyramid pooling.
        auxiliary_channels: of the auxiliary head on the third stage, which serves training only.
        auxiliary_weight: of its loss.
        dropout: of whole channels before the classifiers.
        classifier_std: of the classifiers' first weights. MMSegmentation's 0.01 leaves the classes almost alike, and
            without a pretrained backbone they stay so for long.
    """

    channels: int = 512
    pool_scales: tuple[int, ...] = (1, 2, 3, 6)
    auxiliary_channels: int = 256
    auxiliary_weight: float = 0.4
    dropout: float = 0.1
    classifier_std: float = 0.01

    def __post_init__(self) -> None:
        for key in ("channels", "auxiliary_channels"):
            require(getattr(self, key) >= 1, key, "at least 1", getattr(self, key))
        require(min(self.pool_scales, default=0) >= 1, "pool_scales", "numbers >= 1", self.pool_scales)
        require(len(self.pool_scales) <= 64, "pool_scales", "at most 64 numbers", len(self.pool_scales))
        require(self.auxiliary_weight >= 0, "auxiliary_weight", "0 or more", self.auxiliary_weight)
        require(0 <= self.dropout < 1, "dropout", "a number in [0, 1)", self.dropout)
        require(self.classifier_std >= 0, "classifier_std", "0 or more", self.classifier_std)


class Scores(NamedTuple):
    """Scores (B, classes, height, width) of every pixel, and in training those of the auxiliary head."""

    main: Tensor
    auxiliary: Tensor | None


class UPerNet(nn.Module):
    """Semantic segmentation of normalised images.

    Args:
        backbone: gives the four stages.
        num_classes: of the scores.
        decoder: see `DecoderConfig`.
    """

    def __init__(self, backbone: PolylineBackbone, num_classes: int, decoder: DecoderConfig) -> None:
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
        """Images (B, 3, height, width) to scores of the same height and width."""
        stages = features(self.backbone, images)
        main = _enlarge(self.decode_head(stages), images)
        return Scores(main, _enlarge(self.auxiliary_head(stages), images) if self.training else None)

    def no_weight_decay(self) -> set[str]:
        """See `PolylineBackbone.no_weight_decay`."""
        return without_weight_decay(self.backbone, "backbone.")


class MainScores(nn.Module):
    """A segmentation model that returns one tensor, for exporters.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: UPerNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, height, width) to scores (B, classes, height, width)."""
        return self.model(images).main


def _enlarge(scores: Tensor, images: Tensor) -> Tensor:
    return F.interpolate(scores, size=images.shape[-2:], mode="bilinear", align_corners=False)


def _initialise(head: UperNetHead | UperNetFCNHead, classifier_std: float) -> None:
    """As MMSegmentation starts its heads; transformers leaves PyTorch's defaults."""
    for module in head.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:  # the classifier, the only one without a norm after it
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
        backbone_name: such as "ppma_tiny".
        num_classes: ADE20K has 150.
        decoder: see `DecoderConfig`.
        backbone_kwargs: fields of the backbone's configuration to change.

    Example:
        >>> import torch
        >>> from ppma.tasks.segmentation import upernet
        >>> model = upernet("ppma_nano", num_classes=11).eval()
        >>> model(torch.randn(1, 3, 64, 96)).main.shape
        torch.Size([1, 11, 64, 96])
    """
    return UPerNet(dense_backbone(backbone_name, **backbone_kwargs), num_classes, decoder or DecoderConfig())


def cost(model: UPerNet, size: tuple[int, int] = (512, 2048)) -> Cost:
    """Multiply-adds for one image of (height, width)."""
    return count(model, lambda shadow: shadow(torch.empty(1, 3, *size, device="meta")))

"""What timm's data tools need to know of a model: input size, normalisation, crop."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from ppma.models.config import BackboneConfig, published_variant

FIRST_CONV, CLASSIFIER = "stem.layers.0", "head.fc"  # layers that timm adapts to other channels and classes
# What makes a variant; its classifier, drop rates and formulation may be anything.
_BLOCKS = ("depths", "dims", "heads", "kinds", "ffn_ratios", "stem_stride")


def variant_name(config: BackboneConfig) -> str | None:
    """The published variant that this is, up to its classifier, drop rates and formulation."""
    return published_variant(mask=config.mask, **_blocks(config))


def _blocks(config: BackboneConfig) -> dict[str, Any]:
    return {field: getattr(config, field) for field in _BLOCKS}


def _base(config: BackboneConfig) -> str:
    """The registered name that timm best builds this from: the variant itself, or one of the same blocks, or any."""
    return variant_name(config) or published_variant(mask="2d", **_blocks(config)) or "ppma_tiny"


def pretrained_cfg(config: BackboneConfig) -> dict[str, Any]:
    """The `pretrained_cfg` of a backbone, which says how its images are prepared; it names no weights."""
    small = config.stem_stride == 2
    size = 64 if small else 224
    pooled = size // (config.stem_stride * 2 ** (len(config.depths) - 1))
    return {
        "url": "",
        "architecture": _base(config),
        "num_classes": config.num_classes,
        "input_size": (config.in_chans, size, size),
        "pool_size": (pooled, pooled),
        "crop_pct": 1.0 if small else 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": FIRST_CONV,
        "classifier": CLASSIFIER,
    }

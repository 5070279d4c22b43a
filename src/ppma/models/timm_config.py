"""timm's description of a model: input size, normalisation, crop, adaptable layers."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from ppma.models.config import BackboneConfig, find_variant

FIRST_CONV, CLASSIFIER = "stem.layers.0", "head.fc"  # layers that timm adapts to in_chans and num_classes
# Fields that define a variant; classifier, drop rates and formulation are free.
_BLOCKS = ("depths", "dims", "heads", "kinds", "ffn_ratios", "stem_stride")


def variant_name(config: BackboneConfig) -> str | None:
    """Name of the registered variant with these blocks, for any classifier, drop rates and formulation; or None."""
    return find_variant(mask=config.mask, **_blocks(config))


def _blocks(config: BackboneConfig) -> dict[str, Any]:
    return {field: getattr(config, field) for field in _BLOCKS}


def _base(config: BackboneConfig) -> str:
    """The registered name from which timm builds this model: its variant, else one with the same blocks, else any."""
    return variant_name(config) or find_variant(mask="2d", **_blocks(config)) or "ppma_tiny"


def pretrained_cfg(config: BackboneConfig) -> dict[str, Any]:
    """The `pretrained_cfg` of a backbone, without weights."""
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

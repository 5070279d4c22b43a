"""The names that `timm.create_model` knows after `import ppma`."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from ppma.models.backbone import PolylineBackbone
from ppma.models.config import CONFIGS
from ppma.models.pretrained import PolylineFeatures, saved_arguments, weights_filter
from ppma.models.timm_config import pretrained_cfg

STAGES = (0, 1, 2, 3)
FEATURES = {"feature_cls": PolylineFeatures, "output_fmt": "NCHW"}
__all__: list[str] = []  # register_model adds the names


default_cfgs = generate_default_cfgs({name: pretrained_cfg(config) for name, config in CONFIGS.items()})


def _create(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    """Build a variant; features for dense tasks come with their own layer norms unless asked otherwise."""
    features_only = bool(kwargs.get("features_only"))
    for name, value in saved_arguments(variant, kwargs).items():
        kwargs.setdefault(name, value)
    kwargs.setdefault("feature_norms", STAGES if features_only else ())
    if "img_size" in kwargs:
        _set_input_size(variant, kwargs)
    model = build_model_with_cfg(
        lambda **changes: PolylineBackbone(CONFIGS[variant].replace(**changes)),
        variant,
        pretrained,
        pretrained_filter_fn=weights_filter(features_only=features_only),
        feature_cfg={"out_indices": STAGES, **({} if "feature_cls" in kwargs else FEATURES)},
        **kwargs,
    )
    if isinstance(model, PolylineBackbone):
        model.describe()
    return model


def _set_input_size(variant: str, options: dict[str, Any]) -> None:
    """Images of any size go through the model; the size asked for is what timm's data tools prepare."""
    size = options.pop("img_size")
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    if not all(isinstance(extent, int) and extent > 0 for extent in (height, width)):
        raise ValueError(f"img_size: expected a whole number > 0 or two of them, got {size!r}")
    channels = options.get("in_chans", CONFIGS[variant].in_chans)
    options["pretrained_cfg_overlay"]["input_size"] = (channels, height, width)


@register_model
def ppma_nano(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """About 1 M parameters and strides 2, 4, 8, 16, for images of 32 to 64 pixels and for CPUs."""
    return _create("ppma_nano", pretrained, **kwargs)


@register_model
def ppma_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PPMA-T of the paper, 14 M parameters."""
    return _create("ppma_tiny", pretrained, **kwargs)


@register_model
def ppma_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PPMA-S of the paper, 27 M parameters."""
    return _create("ppma_small", pretrained, **kwargs)


@register_model
def ppma_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PPMA-B of the paper, 54 M parameters."""
    return _create("ppma_base", pretrained, **kwargs)


@register_model
def rmt_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """RMT-T: PPMA-T with the fixed decay of RMT in place of the learned mask."""
    return _create("rmt_tiny", pretrained, **kwargs)


@register_model
def rmt_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """RMT-S: PPMA-S with the fixed decay of RMT in place of the learned mask."""
    return _create("rmt_small", pretrained, **kwargs)


@register_model
def rmt_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """RMT-B: PPMA-B with the fixed decay of RMT in place of the learned mask."""
    return _create("rmt_base", pretrained, **kwargs)

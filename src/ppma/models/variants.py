"""The names that `timm.create_model` knows after `import ppma`."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from ppma.models.authors import filter_state_dict
from ppma.models.backbone import PolylineBackbone
from ppma.models.config import CONFIGS
from ppma.models.preprocessing import pretrained_cfg

STAGES = (0, 1, 2, 3)
__all__: list[str] = []  # register_model adds the names


default_cfgs = generate_default_cfgs({name: pretrained_cfg(config) for name, config in CONFIGS.items()})


def _create(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    """Build a variant; features for dense tasks come with their own layer norms unless asked otherwise."""
    kwargs.setdefault("feature_norms", STAGES if kwargs.get("features_only") else ())
    return build_model_with_cfg(
        lambda **changes: PolylineBackbone(CONFIGS[variant].replace(**changes)),
        variant,
        pretrained,
        pretrained_filter_fn=filter_state_dict,
        pretrained_strict=not kwargs["feature_norms"],  # a classifier's weights have none of those norms
        feature_cfg={"out_indices": STAGES, "feature_cls": "getter"},
        **kwargs,
    )


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

"""Models registered with timm: `timm.create_model` has their names after `import ppma`."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from ppma.models.backbone import PolylineBackbone
from ppma.models.config import CONFIGS
from ppma.models.pretrained import PolylineFeatures, find_pretrained, weights_filter
from ppma.models.published import PUBLISHED
from ppma.models.timm_config import pretrained_cfg

STAGES = (0, 1, 2, 3)
_DESCRIPTIONS = {
    "ppma_nano": "About 1 M parameters and strides 2, 4, 8, 16, for images of 32 to 64 pixels and for CPUs.",
    "ppma_tiny": "PPMA-T of the paper, 14 M parameters.",
    "ppma_small": "PPMA-S of the paper, 27 M parameters.",
    "ppma_base": "PPMA-B of the paper, 54 M parameters.",
    "rmt_tiny": "RMT-T: PPMA-T with the fixed decay of RMT instead of the learned mask.",
    "rmt_small": "RMT-S: PPMA-S with the fixed decay of RMT instead of the learned mask.",
    "rmt_base": "RMT-B: PPMA-B with the fixed decay of RMT instead of the learned mask.",
}
__all__: list[str] = []  # register_model adds the names


def _default_cfgs() -> dict[str, Any]:
    """Describe every variant to timm, once for each of its published weights, or without weights if it has none."""
    described = {}
    for variant, config in CONFIGS.items():
        found = [entry for entry in PUBLISHED.values() if entry.name.startswith(f"{variant}.")]
        for entry in found:
            where = {"hf_hub_id": entry.repository, "hf_hub_filename": entry.file}
            source = where if entry.repository else {"file": entry.file}
            described[entry.name] = {**pretrained_cfg(config), **source, "license": entry.license}
        if not found:
            described[variant] = pretrained_cfg(config)
    return described


default_cfgs = generate_default_cfgs(_default_cfgs())


def _create(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    """Build a variant; with `features_only`, features have layer norms unless `feature_norms` says otherwise."""
    features_only = bool(kwargs.get("features_only"))
    found = find_pretrained(variant, pretrained, kwargs)
    for name, value in found.arguments.items():
        kwargs.setdefault(name, value)
    kwargs.setdefault("feature_norms", STAGES if features_only else ())
    if "img_size" in kwargs:
        _set_input_size(variant, kwargs)
    features = {} if "feature_cls" in kwargs else {"feature_cls": PolylineFeatures, "output_fmt": "NCHW"}
    model = build_model_with_cfg(
        lambda **changes: PolylineBackbone(CONFIGS[variant].replace(**changes)),
        variant,
        pretrained,
        pretrained_filter_fn=weights_filter(found, features_only=features_only),
        feature_cfg={"out_indices": STAGES, **features},
        **kwargs,
    )
    for module in model.modules():
        if isinstance(cfg := getattr(module, "pretrained_cfg", None), dict):
            cfg.pop("state_dict", None)
    if isinstance(model, PolylineBackbone):
        model.describe()
    return model


def _set_input_size(variant: str, options: dict[str, Any]) -> None:
    """Set the image size for timm's data tools; the model itself takes any size."""
    size = options.pop("img_size")
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    if not all(isinstance(extent, int) and extent > 0 for extent in (height, width)):
        raise ValueError(f"img_size: expected a whole number > 0 or two of them, got {size!r}")
    channels = options.get("in_chans", CONFIGS[variant].in_chans)
    options["pretrained_cfg_overlay"]["input_size"] = (channels, height, width)


def _register(variant: str) -> None:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return _create(variant, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = variant
    create.__doc__ = _DESCRIPTIONS[variant]
    globals()[variant] = register_model(create)


for _variant in CONFIGS:
    _register(_variant)

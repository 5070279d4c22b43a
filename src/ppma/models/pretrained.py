"""Pretrained weights for `timm.create_model`: where they are, which model they need, and how they are loaded."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from timm.models import get_pretrained_cfg
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from ppma.models import published
from ppma.models.backbone import PolylineBackbone
from ppma.models.checkpoints import CheckpointError, open_checkpoint, release
from ppma.models.checkpoints.weights import select_weights
from ppma.models.config import CONFIGS, BackboneConfig
from ppma.models.timm_config import CLASSIFIER, FIRST_CONV

_HEAD, _NORMS, _STAGES = "head.", "feature_norms.", "stages."
_OTHER_SOURCES = ("state_dict", "url", "hf_hub_id")  # overlay entries with which users name weights that timm reads


class Pretrained(NamedTuple):
    """Weights that `timm.create_model` is about to load.

    Attributes:
        arguments: of the model that they need, where they differ from the variant's own.
        source: their name, for messages.
        config: of the model that they come from; None if timm reads them, and does not tell.
        state: the weights with our names; None if timm reads them.
    """

    arguments: dict[str, Any]
    source: str = "pretrained weights"
    config: BackboneConfig | None = None
    state: dict[str, Tensor] | None = None


def find_pretrained(variant: str, pretrained: bool, options: dict[str, Any]) -> Pretrained:
    """Find the weights, and read published ones and files; timm would execute pickled code, and not take EMA weights.

    Args:
        variant: a registered name.
        pretrained: whether weights are loaded.
        options: of `timm.create_model`; changed so that timm loads these weights.
    """
    given = options.get("pretrained_cfg")
    arguments: Any = {}
    if isinstance(given, dict):
        given = options["pretrained_cfg"] = dict(given)
        arguments = given.pop("model_args", None) or {}  # of a folder that timm saved
        if not isinstance(arguments, Mapping):
            raise ValueError(f"model_args: expected a mapping in the saved configuration, got {arguments!r}")
    overlay = options["pretrained_cfg_overlay"] = dict(options.get("pretrained_cfg_overlay") or {})
    found = Pretrained(dict(arguments))
    if pretrained and (source := _source(variant, given, overlay)):
        named = source in published.PUBLISHED
        file = published.local_file(source, cache_dir=options.get("cache_dir")) if named else source
        # What the shapes in a file of the authors leave open; masks other than "rmt" and "none" have the same weights.
        hints = {} if named else {key: options[key] for key in ("kinds", "mask") if key in options}
        hints = {key: value for key, value in hints.items() if value not in ("rmt", "none")}
        checkpoint = open_checkpoint(file)
        config, _, state = checkpoint.backbone_weights(**hints)
        arguments = {**config.differences(CONFIGS[variant]), "num_classes": config.num_classes}
        found = Pretrained(arguments, source, config, state)
        prepared = checkpoint.preprocessing.to_timm() if checkpoint.preprocessing else {}
        overlay = {**prepared, "num_classes": config.num_classes, **overlay}
        overlay["state_dict"] = {"source": source}  # for timm, which copies it; `weights_filter` has the weights
        options["pretrained_cfg_overlay"] = overlay
    channels = found.arguments.get("in_chans")
    if channels is not None and options.get("in_chans", channels) == channels:
        overlay["first_conv"] = None  # else timm would adapt it from three channels
    return found


def _source(variant: str, given: object, overlay: Mapping[str, Any]) -> str | None:
    """The published name or the file that timm would load, None for timm's other sources."""
    if any(overlay.get(source) for source in _OTHER_SOURCES):
        return None
    file = overlay.get("file") or (given.get("file") if isinstance(given, dict) else None)
    if file is not None:
        return str(file) if Path(file).is_file() else None
    if given is not None and not isinstance(given, str):
        return None
    config = get_pretrained_cfg(f"{variant}.{given}" if given else variant)
    name = f"{variant}.{config.tag}" if config is not None else ""
    return name if name in published.PUBLISHED else None


def weights_filter(
    found: Pretrained, *, features_only: bool
) -> Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]:
    """The `pretrained_filter_fn` of timm: checks weights, and gives them our names."""

    def take(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        assert isinstance(model, PolylineBackbone)
        if found.state is not None:
            state = found.state
        message = model.origin_mismatch(state) if found.config is None else model.config.mismatch(found.config)
        if message:
            raise CheckpointError(f"{found.source}: {message}")
        own = model.state_dict()
        state = {name: tensor for name, tensor in own.items() if name.startswith(_NORMS)} | in_our_names(state)

        source, config = found.config, model.config
        adapted = [_HEAD] if features_only else []  # timm fits these layers to num_classes and in_chans
        adapted += [f"{CLASSIFIER}."] if source is None or source.num_classes != config.num_classes else []
        adapted += [f"{FIRST_CONV}."] if source is None or source.in_chans != config.in_chans else []

        def fixed(name: str) -> bool:
            return not name.startswith(tuple(adapted))

        select_weights(
            {name: tensor for name, tensor in own.items() if fixed(name)},
            {name: tensor for name, tensor in state.items() if fixed(name)},
            source=found.source,
        )
        return state

    return take


def in_our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with our names, whichever names they have."""
    return release.convert(state) if release.is_release_layout(state) else dict(state)


class PolylineFeatures(FeatureGetterNet):
    """timm's feature extractor, which also loads the `state_dict` of a whole backbone.

    Weights it has no use for are ignored: those of the head, of later stages and of their norms. Feature norms that the
    weights lack keep their initial values.
    """

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        if own and not any(name.startswith("model.") for name in own):
            for name in own:
                del state_dict[prefix + name]
            state_dict.update({f"{prefix}model.{name}": value for name, value in self._needed(own).items()})
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _needed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        backbone = self.model
        assert isinstance(backbone, PolylineBackbone)
        if not backbone.origin_mismatch(state):
            state = in_our_names(state)

        def needed(name: str) -> bool:
            part = name.split(".")[1:2]
            if name.startswith(_STAGES):
                return part[0] in map(str, range(len(backbone.stages)))
            return not name.startswith(_HEAD) and not (
                name.startswith(_NORMS) and part[0] not in backbone.feature_norms
            )

        initial = {f"{_NORMS}{name}": tensor for name, tensor in backbone.feature_norms.state_dict().items()}
        return initial | {name: value for name, value in state.items() if needed(name)}

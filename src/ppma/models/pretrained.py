"""Weights through `timm.create_model`: which model a file is of, and what of it a new model takes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from ppma.models.backbone import PolylineBackbone
from ppma.models.checkpoints import CheckpointError, open_checkpoint, release
from ppma.models.checkpoints.reader import is_safetensors
from ppma.models.checkpoints.weights import select_weights
from ppma.models.config import CONFIGS
from ppma.models.timm_config import CLASSIFIER, FIRST_CONV

_HEAD, _NORMS, _STAGES = "head.", "feature_norms.", "stages."


def saved_arguments(variant: str, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model whose weights timm is about to load, as far as they differ from the variant's own.

    They stand in the `config.json` of a folder that timm wrote, and in the metadata of our own files.

    Args:
        variant: a registered name.
        options: what `timm.create_model` passed on; changed so that timm takes the weights as they are.
    """
    given = options.get("pretrained_cfg")
    saved: Any = {}
    if isinstance(given, dict):
        given = options["pretrained_cfg"] = dict(given)
        saved = given.pop("model_args", None) or {}
    overlay = options["pretrained_cfg_overlay"] = dict(options.get("pretrained_cfg_overlay") or {})
    path = overlay.get("file") or (given.get("file") if isinstance(given, dict) else None)
    if path and Path(path).is_file() and is_safetensors(Path(path)):
        stored = open_checkpoint(path).backbone
        if stored is not None:
            saved = {**stored.differences(CONFIGS[variant]), "num_classes": stored.num_classes}
            overlay.setdefault("num_classes", stored.num_classes)
    if not isinstance(saved, Mapping):
        raise ValueError(f"model_args: expected a mapping in the saved configuration, got {saved!r}")
    channels = saved.get("in_chans")
    if channels is not None and options.get("in_chans", channels) == channels:
        overlay["first_conv"] = None  # else timm would adapt it from three channels
    return dict(saved)


def weights_filter(*, features_only: bool) -> Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]:
    """For timm: a function from the weights of a file, in either layout, to those of a new model, checked."""

    def take(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        assert isinstance(model, PolylineBackbone)
        source = "pretrained weights"
        if message := model.origin_mismatch(state):
            raise CheckpointError(f"{source}: {message}")
        own, state = model.state_dict(), in_our_names(state)
        state = {name: tensor for name, tensor in own.items() if name.startswith(_NORMS)} | state

        def fixed(name: str) -> bool:  # timm adapts the other layers to the classes and channels asked for
            return not name.startswith(_HEAD if features_only else f"{CLASSIFIER}.") and not name.startswith(FIRST_CONV)

        select_weights(
            {name: tensor for name, tensor in own.items() if fixed(name)},
            {name: tensor for name, tensor in state.items() if fixed(name)},
            source=source,
        )
        return state

    return take


def in_our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of either layout in our names."""
    return release.convert(state) if release.is_release_layout(state) else dict(state)


class PolylineFeatures(FeatureGetterNet):
    """timm's wrapper for the features of some stages, which also takes the weights of a whole backbone.

    It leaves out what it does not have: the head, later stages and their norms. Norms that the weights lack keep their
    values.
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
        if release.is_release_layout(state) and not backbone.origin_mismatch(state):
            state = release.convert(state)

        def needed(name: str) -> bool:
            part = name.split(".")[1:2]
            if name.startswith(_STAGES):
                return part[0] in map(str, range(len(backbone.stages)))
            return not name.startswith(_HEAD) and not (
                name.startswith(_NORMS) and part[0] not in backbone.feature_norms
            )

        fresh = {f"{_NORMS}{name}": tensor for name, tensor in backbone.feature_norms.state_dict().items()}
        return fresh | {name: value for name, value in state.items() if needed(name)}

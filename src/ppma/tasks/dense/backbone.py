"""Backbones without a classifier whose four stage outputs feed a neck or decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ppma.models import CONFIGS, BackboneConfig, Checkpoint, PolylineBackbone, load_checkpoint, open_checkpoint
from ppma.models.checkpoints.weights import build, load_weights
from ppma.models.loading import load_model
from ppma.models.timm_features import TimmFeatures
from ppma.models.timm_models import TimmModel, check_model

STAGES = (0, 1, 2, 3)
Backbone = PolylineBackbone | TimmFeatures


def _for_dense_tasks(config: BackboneConfig) -> BackboneConfig:
    """The configuration without a head and with a layer norm on each stage output, as in the authors' dense models."""
    return config.replace(feature_norms=STAGES).without_head(len(STAGES))


def dense_backbone(name: str, *, pretrained: bool = False, **changes: Any) -> Backbone:
    """A backbone for `features`; ours have a layer norm on each stage output.

    Args:
        name: a key of `ppma.models.CONFIGS`, such as "ppma_tiny", or a model of timm with a feature pyramid.
        pretrained: load timm's weights of a model of timm.
        changes: fields of `BackboneConfig` to override, or arguments of timm's model.
    """
    check_model(name, changes, "backbone_name")
    if name in CONFIGS:
        return dense_backbone_of(CONFIGS[name].replace(**changes))
    return TimmFeatures(TimmModel(name, changes), pretrained=pretrained)


def dense_backbone_of(config: BackboneConfig) -> PolylineBackbone:
    """The same for a configuration."""
    return PolylineBackbone(_for_dense_tasks(config))


def pretrained_backbone(path: str | Path | Checkpoint, **changes: Any) -> Backbone:
    """A dense backbone initialised from any file that `ppma train` writes or `ppma.load_checkpoint` reads.

    The file determines the architecture. A classifier's head is dropped; output norms that the file lacks are
    initialised.

    Args:
        path: weight file.
        changes: fields of `BackboneConfig` to override, or arguments of timm's model.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint.timm_model is not None:
        return timm_backbone(checkpoint, **changes).train()
    trained = load_checkpoint(checkpoint, **changes)
    model = dense_backbone_of(trained.config)
    state = {name: tensor for name, tensor in trained.state_dict().items() if not name.startswith("head.")}
    fresh = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("feature_norms.")}
    load_weights(model, fresh | state, source=str(checkpoint.path))
    return model


def timm_backbone(checkpoint: Checkpoint, **changes: Any) -> TimmFeatures:
    """The backbone of timm in a file of `ppma train`, of a dense model or of a classifier; the file must have one.

    Args:
        checkpoint: with a `timm_model`.
        changes: arguments of timm's model.
    """
    model = checkpoint.timm_model
    assert model is not None
    changed = TimmModel(model.name, {**model.args, **changes})
    if checkpoint.larger:
        return build(lambda: TimmFeatures(changed), checkpoint.prefixed_weights(), source=str(checkpoint.path))
    return TimmFeatures(changed, weights=load_model(checkpoint, **changes).state_dict())


def without_weight_decay(backbone: Backbone, prefix: str) -> set[str]:
    """Names of the backbone parameters without weight decay, as the model that contains the backbone calls them."""
    return {prefix + name for name in backbone.no_weight_decay()}


def authors_without_weight_decay(backbone: Backbone, prefix: str) -> set[str]:
    """Names of all parameters that the authors' dense trainings exclude: the norms of the backbone, without the stem's.

    MMCV excludes names with "norm", which the batch norms of the stem and of the heads do not have there.
    """
    return {prefix + name for name, _ in backbone.named_parameters() if "norm" in name}


def features(backbone: Backbone, images: Tensor) -> list[Tensor]:
    """Four feature maps (B, C, H, W), strides 4, 8, 16 and 32, of images (B, 3, height, width)."""
    if isinstance(backbone, TimmFeatures):
        return backbone(images)
    taken = backbone.forward_intermediates(images, intermediates_only=True)
    assert isinstance(taken, list)
    return taken


def feature_channels(backbone: Backbone) -> Sequence[int]:
    """Channels of the four feature maps."""
    return [int(info["num_chs"]) for info in backbone.feature_info]

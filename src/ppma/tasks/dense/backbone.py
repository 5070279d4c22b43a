"""Backbones without their classifier, for heads that read the features of every stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ppma.models import CONFIGS, BackboneConfig, PolylineBackbone, load_checkpoint
from ppma.models.checkpoints.weights import load_weights
from ppma.ops import checks

STAGES = (0, 1, 2, 3)


def _for_dense_tasks(config: BackboneConfig) -> BackboneConfig:
    """The same stages, each with a layer norm on its output as in the authors' detection and segmentation models."""
    return config.replace(feature_norms=STAGES).without_head(len(STAGES))


def dense_backbone(name: str, **changes: Any) -> PolylineBackbone:
    """A registered backbone whose `forward_intermediates` gives four normed stages.

    Args:
        name: a name of `ppma.models.CONFIGS`.
        changes: fields of its configuration to change.
    """
    checks.one_of("backbone_name", name, CONFIGS)
    return dense_backbone_of(CONFIGS[name].replace(**changes))


def dense_backbone_of(config: BackboneConfig) -> PolylineBackbone:
    """The same from a configuration."""
    return PolylineBackbone(_for_dense_tasks(config))


def pretrained_backbone(path: str | Path, **changes: Any) -> PolylineBackbone:
    """A backbone with the weights of any file that `ppma.load_checkpoint` reads, a classifier's among them.

    The architecture is the file's. Norms on the outputs start anew where the file has none; a classifier's head is left
    out.

    Args:
        path: of the file.
        changes: fields of its configuration to change.
    """
    trained = load_checkpoint(path, **changes)
    model = dense_backbone_of(trained.config)
    state = {name: tensor for name, tensor in trained.state_dict().items() if not name.startswith("head.")}
    fresh = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("feature_norms.")}
    load_weights(model, fresh | state, source=str(path))
    return model


def without_weight_decay(backbone: PolylineBackbone, prefix: str) -> set[str]:
    """The parameters of a larger model that take no weight decay because those of its backbone do not."""
    return {prefix + name for name in backbone.no_weight_decay()}


def authors_without_weight_decay(backbone: PolylineBackbone, prefix: str) -> set[str]:
    """Names of all parameters that the authors' dense trainings exclude: the norms of the backbone, without the stem's.

    MMCV excludes names with "norm", which the batch norms of the stem and of the heads do not have there.
    """
    return {prefix + name for name, _ in backbone.named_parameters() if "norm" in name}


def features(backbone: PolylineBackbone, images: Tensor) -> list[Tensor]:
    """Images (B, 3, height, width) to four features (B, C, H, W) of strides 4, 8, 16, 32."""
    taken = backbone.forward_intermediates(images, intermediates_only=True)
    assert isinstance(taken, list)
    return taken


def feature_channels(backbone: PolylineBackbone) -> Sequence[int]:
    """Channels of the four features."""
    return [int(info["num_chs"]) for info in backbone.feature_info]

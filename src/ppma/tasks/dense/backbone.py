"""Backbones without a classifier whose four stage outputs feed a neck or decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ppma.models import CONFIGS, BackboneConfig, PolylineBackbone, load_checkpoint
from ppma.models.checkpoints.weights import load_weights
from ppma.ops import checks

STAGES = (0, 1, 2, 3)


def _for_dense_tasks(config: BackboneConfig) -> BackboneConfig:
    """The configuration without a head and with a layer norm on each stage output, as in the authors' dense models."""
    return config.replace(feature_norms=STAGES).without_head(len(STAGES))


def dense_backbone(name: str, **changes: Any) -> PolylineBackbone:
    """A registered backbone that returns four normalised feature maps from `forward_intermediates`.

    Args:
        name: a key of `ppma.models.CONFIGS`, such as "ppma_tiny".
        changes: fields of `BackboneConfig` to override.
    """
    checks.one_of("backbone_name", name, CONFIGS)
    return dense_backbone_of(CONFIGS[name].replace(**changes))


def dense_backbone_of(config: BackboneConfig) -> PolylineBackbone:
    """The same for a configuration."""
    return PolylineBackbone(_for_dense_tasks(config))


def pretrained_backbone(path: str | Path, **changes: Any) -> PolylineBackbone:
    """A dense backbone initialised from any file that `ppma.load_checkpoint` reads.

    The file determines the architecture. A classifier's head is dropped; output norms that the file lacks are
    initialised.

    Args:
        path: weight file.
        changes: fields of `BackboneConfig` to override.
    """
    trained = load_checkpoint(path, **changes)
    model = dense_backbone_of(trained.config)
    state = {name: tensor for name, tensor in trained.state_dict().items() if not name.startswith("head.")}
    fresh = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("feature_norms.")}
    load_weights(model, fresh | state, source=str(path))
    return model


def without_weight_decay(backbone: PolylineBackbone, prefix: str) -> set[str]:
    """Names of the backbone parameters without weight decay, as the model that contains the backbone calls them."""
    return {prefix + name for name in backbone.no_weight_decay()}


def authors_without_weight_decay(backbone: PolylineBackbone, prefix: str) -> set[str]:
    """Names of all parameters that the authors' dense trainings exclude: the norms of the backbone, without the stem's.

    MMCV excludes names with "norm", which the batch norms of the stem and of the heads do not have there.
    """
    return {prefix + name for name, _ in backbone.named_parameters() if "norm" in name}


def features(backbone: PolylineBackbone, images: Tensor) -> list[Tensor]:
    """Four feature maps (B, C, H, W), strides 4, 8, 16 and 32, of images (B, 3, height, width)."""
    taken = backbone.forward_intermediates(images, intermediates_only=True)
    assert isinstance(taken, list)
    return taken


def feature_channels(backbone: PolylineBackbone) -> Sequence[int]:
    """Channels of the four feature maps."""
    return [int(info["num_chs"]) for info in backbone.feature_info]

"""Trained segmentation models from files: ours, and those of MMSegmentation, which the authors used."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ppma import config as configs
from ppma.data.ade20k import Ade20kDataConfig
from ppma.models import PolylineBackbone, authors, files
from ppma.tasks.dense.backbone import dense_backbone_of
from ppma.tasks.dense.weights import read_model
from ppma.tasks.segmentation.config import SegmentationConfig
from ppma.tasks.segmentation.model import DecoderConfig, UPerNet
from ppma.tasks.segmentation.testing import TestConfig

_HEADS = ("decode_head.", "auxiliary_head.")
_CLASSIFIER = files.MMSEGMENTATION_CLASSIFIER
# MMSegmentation's names as patterns, ours as replacements.
_RENAMED = ((r"\.bn\.", ".batch_norm."), (r"head\.conv_seg\.", "head.classifier.1."))


def convert_heads(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of both heads in our names."""
    converted = {}
    for name, tensor in state.items():
        if name.startswith(_HEADS):
            for pattern, ours in _RENAMED:
                name = re.sub(pattern, ours, name)
            converted[name] = tensor
    return converted


def numbered(classes: int) -> tuple[str, ...]:
    """The names of classes in files that do not name them."""
    return tuple(map(str, range(classes)))


def load_segmenter(path: str | Path, **changes: Any) -> tuple[UPerNet, SegmentationConfig, tuple[str, ...]]:
    """A trained UPerNet, in evaluation mode, with its configuration and its classes.

    The authors' files are in MMSegmentation's layout: the model then computes what their released code computes, and
    its classes are numbers, because the file does not name them.

    Args:
        path: a file of `ppma train`, or one of MMSegmentation.
        changes: fields of the backbone's configuration to change, for files of MMSegmentation.
    """
    if Path(path).suffix == ".safetensors":
        stored = read_model(path, "segmentation")
        config = configs.build(SegmentationConfig, stored.config, source=str(path))
        model = UPerNet(PolylineBackbone(stored.backbone), len(stored.classes), config.decoder)
        files.load_weights(model, stored.state, source=str(path))
        return model.eval(), config, stored.classes
    contents = files.read_torch(path)
    if not isinstance(contents, Mapping) or _CLASSIFIER not in (contents.get("state_dict") or {}):
        raise files.CheckpointError(f"{path}: expected a UPerNet in MMSegmentation's layout, found no {_CLASSIFIER!r}")
    return _from_mmsegmentation(contents, str(path), **changes)


def _from_mmsegmentation(
    contents: Mapping[str, Any], source: str, **changes: Any
) -> tuple[UPerNet, SegmentationConfig, tuple[str, ...]]:
    whole = contents["state_dict"]
    backbone = authors.find_weights(contents, ema=False, source=source)
    backbone_config = authors.infer_config(backbone, source=source, **changes)
    classes, channels = whole[_CLASSIFIER].shape[:2]
    decoder = DecoderConfig(channels=channels, auxiliary_channels=whole["auxiliary_head.conv_seg.weight"].shape[1])
    model = UPerNet(dense_backbone_of(backbone_config), classes, decoder)
    converted = {f"backbone.{name}": tensor for name, tensor in authors.convert(backbone).items()}
    files.load_weights(model, converted | convert_heads(whole), source=source)
    names = numbered(classes)
    config = SegmentationConfig(
        task="segmentation",
        model="ppma_tiny",
        steps=1,
        batch_size=2,
        lr=6e-5,
        data=Ade20kDataConfig(root="", classes=names, labels="ade20k"),
        decoder=decoder,
        test=TestConfig(mode="slide"),
    )
    return model.eval(), config, names

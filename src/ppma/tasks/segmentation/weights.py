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
from ppma.tasks.dense.weights import checked_config, read_model
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
        if isinstance(name, str) and name.startswith(_HEADS):
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
    if files.is_safetensors(path):
        stored = read_model(path, "segmentation")
        config = checked_config(SegmentationConfig, stored, path)

        def make() -> UPerNet:
            return UPerNet(PolylineBackbone(stored.backbone), len(stored.classes), config.decoder)

        return files.build(make, stored.state, source=str(path)), config, stored.classes
    contents = files.read_torch(path)
    if not is_mmsegmentation(contents):
        raise files.CheckpointError(f"{path}: expected a UPerNet in MMSegmentation's layout, found no {_CLASSIFIER!r}")
    return _from_mmsegmentation(contents, str(path), **changes)


def is_mmsegmentation(contents: Any) -> bool:
    """Whether what a file holds is a segmentation model of MMSegmentation."""
    state = contents.get("state_dict") if isinstance(contents, Mapping) else None
    return isinstance(state, Mapping) and _CLASSIFIER in state


def _from_mmsegmentation(
    contents: Mapping[str, Any], source: str, **changes: Any
) -> tuple[UPerNet, SegmentationConfig, tuple[str, ...]]:
    whole = contents["state_dict"]
    backbone = authors.find_weights(contents, ema=False, source=source)
    backbone_config = authors.infer_config(backbone, source=source, **changes)
    heads = convert_heads(whole)
    files.check_tensors(heads, source=source)
    main, auxiliary = (heads.get(f"{head}classifier.1.weight") for head in _HEADS)
    if main is None or auxiliary is None or main.ndim != 4 or auxiliary.ndim != 4:
        raise files.CheckpointError(f"{source}: expected the classifiers of both heads, (classes, channels, 1, 1) each")
    try:
        decoder = DecoderConfig(channels=main.shape[1], auxiliary_channels=auxiliary.shape[1])
    except configs.ConfigError as error:
        raise files.CheckpointError(f"{source}: {error}") from None
    classes = main.shape[0]
    converted = {f"backbone.{name}": tensor for name, tensor in authors.convert(backbone).items()}
    model = files.build(
        lambda: UPerNet(dense_backbone_of(backbone_config), classes, decoder), converted | heads, source=source
    )
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
    return model, config, names

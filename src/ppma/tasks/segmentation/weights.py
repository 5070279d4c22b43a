"""Trained segmentation models from files of `ppma train` and of MMSegmentation, which the authors used."""

import warnings
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma.data import cityscapes
from ppma.data.segmentation import SegmentationDataConfig
from ppma.models import CONFIGS, BackboneConfig, Checkpoint, CheckpointError, open_checkpoint
from ppma.models.checkpoints import openmmlab
from ppma.models.checkpoints.weights import build, check_tensors
from ppma.tasks.dense.backbone import Backbone, dense_backbone_of
from ppma.tasks.dense.weights import load_model, save_model
from ppma.tasks.segmentation.config import ScoringConfig
from ppma.tasks.segmentation.model import DecoderConfig, UPerNet
from ppma.tasks.segmentation.scoring import InferenceConfig


def load_segmenter(path: str | Path | Checkpoint, **changes: Any) -> tuple[UPerNet, ScoringConfig, tuple[str, ...]]:
    """Load a trained UPerNet.

    A file of MMSegmentation gives a model in the release formulation, tested as the authors test it. Its classes are
    those that `meta` names, or numbers.

    Args:
        path: a file of `ppma train` or of MMSegmentation, or a name that `ppma weights` lists.
        changes: fields of `BackboneConfig` to override, for files of MMSegmentation.

    Returns:
        The model in evaluation mode, how it segments images, and the names of its classes.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint.metadata:
        return load_model(checkpoint, "segmentation", ScoringConfig, _make)
    if checkpoint.task != "segmentation":
        raise CheckpointError(
            f"{checkpoint.path}: expected a UPerNet in MMSegmentation's layout, "
            f"found no {openmmlab.SEGMENTATION_CLASSIFIER!r}"
        )
    return _load_mmsegmentation(checkpoint, **changes)


def _make(backbone: Backbone, config: ScoringConfig, classes: int) -> UPerNet:
    return UPerNet(backbone, classes, config.decoder)


def _load_mmsegmentation(checkpoint: Checkpoint, **changes: Any) -> tuple[UPerNet, ScoringConfig, tuple[str, ...]]:
    source = str(checkpoint.path)
    _, backbone, state = checkpoint.backbone_weights(**changes)
    heads = openmmlab.convert_segmentation_heads(checkpoint.contents["state_dict"])
    check_tensors(heads, source=source)
    main, auxiliary = (heads.get(f"{head}classifier.1.weight") for head in openmmlab.SEGMENTATION_HEADS)
    if main is None or auxiliary is None or main.ndim != 4 or auxiliary.ndim != 4:
        raise CheckpointError(f"{source}: expected the classifiers of both heads, (classes, channels, 1, 1) each")
    outputs = main.shape[0]
    names = checkpoint.classes or tuple(map(str, range(outputs)))
    if len(names) > outputs:
        raise CheckpointError(f"{source}: expected an output for each of the {len(names)} classes, found {outputs}")
    if len(names) < outputs:  # the authors' Cityscapes models kept the 150 outputs of ADE20K
        warnings.warn(f"{source}: {outputs} outputs for {len(names)} classes, the first are used", stacklevel=3)
        for name in heads:
            if ".classifier." in name:
                heads[name] = heads[name][: len(names)]
    try:
        decoder = DecoderConfig(channels=main.shape[1], auxiliary_channels=auxiliary.shape[1])
    except configs.ConfigError as error:
        raise CheckpointError(f"{source}: {error}") from None
    config = _as_tested(names, backbone, decoder)
    weights = {f"backbone.{name}": tensor for name, tensor in state.items()} | heads
    model = build(lambda: _make(dense_backbone_of(backbone), config, len(names)), weights, source=source)
    return model, config, names


def _as_tested(names: tuple[str, ...], backbone: BackboneConfig, decoder: DecoderConfig) -> ScoringConfig:
    """The authors' test settings for the data set of these classes."""
    if names == cityscapes.CLASSES:
        data = SegmentationDataConfig(root="", name="cityscapes", short_side=1024, long_side=2048, antialias=False)
        stride = 768 if backbone.depths == CONFIGS["ppma_tiny"].depths else 341
        return ScoringConfig(data, decoder, InferenceConfig(mode="slide", window=1024, stride=stride))
    data = SegmentationDataConfig(root="", classes=names, labels="ade20k", antialias=False)
    return ScoringConfig(data, decoder, InferenceConfig(mode="slide"))


def save_segmenter(model: UPerNet, path: Path, config: Any, classes: tuple[str, ...]) -> None:
    """Write a model to our format.

    Args:
        model: the model.
        path: output file, `.safetensors`.
        config: its `SegmentationConfig` or `ScoringConfig`.
        classes: class names.
    """
    save_model(model, path, model.backbone, "backbone.", config, classes, task="segmentation")


def convert_segmenter(checkpoint: Checkpoint, target: Path, **changes: Any) -> str | None:
    """Convert MMSegmentation's UPerNet to our format (.safetensors), see `ppma.tasks.base.Task.convert`."""
    if checkpoint.native or target.suffix != ".safetensors":
        return None
    model, config, classes = load_segmenter(checkpoint, **changes)
    save_segmenter(model, target, config, classes)
    return f"{target}: UPerNet, {len(classes)} classes, {sum(p.numel() for p in model.parameters()):,} parameters"

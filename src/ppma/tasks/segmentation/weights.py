"""Trained segmentation models from files of `ppma train` and of MMSegmentation, which the authors used."""

import warnings
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma.data import cityscapes
from ppma.data.segmentation import SegmentationDataConfig
from ppma.models import CONFIGS, BackboneConfig, Checkpoint, CheckpointError, PolylineBackbone, open_checkpoint
from ppma.models.checkpoints import openmmlab
from ppma.models.checkpoints.weights import build, check_tensors
from ppma.tasks.dense.backbone import dense_backbone_of
from ppma.tasks.dense.weights import load_model
from ppma.tasks.segmentation.config import ScoringConfig, SegmentationConfig
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

        def make(backbone: PolylineBackbone, config: SegmentationConfig, classes: int) -> UPerNet:
            return UPerNet(backbone, classes, config.decoder)

        model, config, names = load_model(checkpoint, "segmentation", SegmentationConfig, make)
        return model, ScoringConfig(config.data, config.test), names
    if checkpoint.task != "segmentation":
        raise CheckpointError(
            f"{checkpoint.path}: expected a UPerNet in MMSegmentation's layout, "
            f"found no {openmmlab.SEGMENTATION_CLASSIFIER!r}"
        )
    model, names = _from_mmsegmentation(checkpoint, **changes)
    return model, _as_tested(names, model.backbone.config), names


def _from_mmsegmentation(checkpoint: Checkpoint, **changes: Any) -> tuple[UPerNet, tuple[str, ...]]:
    source, whole = str(checkpoint.path), checkpoint.contents["state_dict"]
    _, backbone, state = checkpoint.backbone_weights(**changes)
    heads = openmmlab.convert_segmentation_heads(whole)
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
    converted = {f"backbone.{name}": tensor for name, tensor in state.items()}
    model = build(lambda: UPerNet(dense_backbone_of(backbone), len(names), decoder), converted | heads, source=source)
    return model, names


def _as_tested(names: tuple[str, ...], backbone: BackboneConfig) -> ScoringConfig:
    """The authors' test settings for the data set of these classes."""
    if names == cityscapes.CLASSES:
        data = SegmentationDataConfig(root="", name="cityscapes", short_side=1024, long_side=2048, antialias=False)
        stride = 768 if backbone.depths == CONFIGS["ppma_tiny"].depths else 341
        return ScoringConfig(data, InferenceConfig(mode="slide", window=1024, stride=stride))
    data = SegmentationDataConfig(root="", classes=names, labels="ade20k", antialias=False)
    return ScoringConfig(data, InferenceConfig(mode="slide"))

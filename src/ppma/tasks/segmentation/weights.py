"""Trained segmentation models from files: ours, and those of MMSegmentation, which the authors used."""

from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma.data.ade20k import Ade20kDataConfig
from ppma.models import Checkpoint, CheckpointError, PolylineBackbone, open_checkpoint
from ppma.models.checkpoints import openmmlab
from ppma.models.checkpoints.weights import build, check_tensors
from ppma.tasks.dense.backbone import dense_backbone_of
from ppma.tasks.dense.weights import load_model
from ppma.tasks.segmentation.config import ScoringConfig, SegmentationConfig
from ppma.tasks.segmentation.model import DecoderConfig, UPerNet
from ppma.tasks.segmentation.scoring import InferenceConfig


def numbered(classes: int) -> tuple[str, ...]:
    """The names of classes in files that do not name them."""
    return tuple(map(str, range(classes)))


def load_segmenter(path: str | Path | Checkpoint, **changes: Any) -> tuple[UPerNet, ScoringConfig, tuple[str, ...]]:
    """A trained UPerNet, in evaluation mode, how it scores images, and its classes.

    The authors' files are in MMSegmentation's layout: the model then computes what their released code computes, and
    its classes are numbers, because the file does not name them.

    Args:
        path: a file of `ppma train`, or one of MMSegmentation.
        changes: fields of the backbone's configuration to change, for files of MMSegmentation.
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
    model = _from_mmsegmentation(checkpoint, **changes)
    names = numbered(model.num_classes)
    return (
        model,
        ScoringConfig(Ade20kDataConfig(root="", classes=names, labels="ade20k"), InferenceConfig(mode="slide")),
        names,
    )


def _from_mmsegmentation(checkpoint: Checkpoint, **changes: Any) -> UPerNet:
    source, whole = str(checkpoint.path), checkpoint.contents["state_dict"]
    _, backbone, state = checkpoint.backbone_weights(**changes)
    heads = openmmlab.convert_segmentation_heads(whole)
    check_tensors(heads, source=source)
    main, auxiliary = (heads.get(f"{head}classifier.1.weight") for head in openmmlab.SEGMENTATION_HEADS)
    if main is None or auxiliary is None or main.ndim != 4 or auxiliary.ndim != 4:
        raise CheckpointError(f"{source}: expected the classifiers of both heads, (classes, channels, 1, 1) each")
    try:
        decoder = DecoderConfig(channels=main.shape[1], auxiliary_channels=auxiliary.shape[1])
    except configs.ConfigError as error:
        raise CheckpointError(f"{source}: {error}") from None
    converted = {f"backbone.{name}": tensor for name, tensor in state.items()}
    return build(lambda: UPerNet(dense_backbone_of(backbone), main.shape[0], decoder), converted | heads, source=source)

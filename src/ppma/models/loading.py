"""Loading and saving of backbones and classifiers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ppma.data import imagenet
from ppma.data.preprocessing import Preprocessing
from ppma.models.backbone import PolylineBackbone
from ppma.models.checkpoints import Checkpoint, CheckpointError, open_checkpoint, write_checkpoint
from ppma.models.checkpoints.weights import build, check_size
from ppma.models.config import BackboneConfig
from ppma.models.timm_models import TimmModel


def save_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    preprocessing: Preprocessing | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write weights and configuration to one safetensors file, from which `load_checkpoint` rebuilds the model.

    Args:
        model: one of our backbones, or a model of `ppma.models.timm_models.TimmModel`.
        path: of the file.
        preprocessing: of a classifier's images; only together with `classes`.
        classes: names in the order of the scores; only together with `preprocessing`.

    Examples:
        >>> import tempfile, timm, ppma
        >>> model = timm.create_model("ppma_nano", num_classes=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ppma.save_checkpoint(model, f"{folder}/nano.safetensors")
        ...     ppma.load_checkpoint(f"{folder}/nano.safetensors").num_classes
        10
    """
    backbone = description(model)
    if (preprocessing is None) != (classes is None):
        raise ValueError("preprocessing, classes: expected both or neither, got one")
    if preprocessing is None or classes is None:
        write_checkpoint(path, model.state_dict(), backbone)
        return
    facts = {"classes": list(classes), **dataclasses.asdict(preprocessing)}
    write_checkpoint(path, model.state_dict(), backbone, task="classification", facts=facts)


def description(model: nn.Module) -> BackboneConfig | TimmModel:
    """From what a model is rebuilt: the configuration of a backbone of ours, or the name of a model of timm."""
    found = model.config if isinstance(model, PolylineBackbone) else getattr(model, "timm_model", None)
    if found is None:
        raise ValueError(f"model: expected a PolylineBackbone, got {type(model).__name__}")
    return found


def load_checkpoint(
    path: str | Path | Checkpoint, *, ema: bool | None = None, strict: bool = True, **overrides: Any
) -> PolylineBackbone:
    """Load a backbone from a weight file of any task, ours (`save_checkpoint`, `ppma train`) or the authors'.

    The configuration of the authors' files is inferred from their shapes, in the release formulation. Nothing in a file
    is executed.

    Args:
        path: of the file, a published name (`ppma weights` lists them), or an open checkpoint.
        ema: take the EMA weights of a file of the authors; None takes them if the file has them, because the published
            figures are theirs.
        strict: raise an error for missing, unexpected and mis-shaped weights; otherwise warn and leave them out.
        overrides: fields of `BackboneConfig` to change, such as `num_classes` or `mask`.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: the file is damaged, could only be loaded by executing pickled code, or does not fit; the
            message names the weights.

    Examples:
        >>> import tempfile, timm, ppma
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ppma.save_checkpoint(timm.create_model("ppma_nano", mask="v2h"), f"{folder}/nano.safetensors")
        ...     ppma.load_checkpoint(f"{folder}/nano.safetensors").config.mask
        'v2h'
    """
    checkpoint = open_checkpoint(path)
    stored, config, state = checkpoint.backbone_weights(ema=ema, **overrides)
    source = str(checkpoint.path)
    check_size(stored, state, source=source)
    return build(lambda: PolylineBackbone(config), state, source=source, strict=strict)


def load_model(path: str | Path | Checkpoint, **overrides: Any) -> nn.Module:
    """Load a backbone as `load_checkpoint` does, or a classifier of timm that `ppma train` wrote.

    Args:
        path: as in `load_checkpoint`.
        overrides: fields of `BackboneConfig` to change, or arguments of timm's model.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint.timm_model is None:
        return load_checkpoint(checkpoint, **overrides)
    source = str(checkpoint.path)
    if checkpoint.larger or checkpoint.classes is None:
        raise CheckpointError(f"{source}: expected a classifier, got a {checkpoint.task} model")
    model, count = checkpoint.timm_model, len(checkpoint.classes)
    try:
        changed = TimmModel(model.name, {**model.args, **overrides})
        return build(lambda: changed.create(num_classes=count), checkpoint.contents, source=source)
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{source}: {error}") from None


def load_classifier(
    path: str | Path | Checkpoint, *, headless: bool = False
) -> tuple[nn.Module, Preprocessing, tuple[str, ...]]:
    """Load a classifier in evaluation mode, the preprocessing of its images and its class names.

    If the file does not have them (the authors' do not), preprocessing is that of the published models, and class names
    are ImageNet's WordNet ids for 1,000 classes, else numbers.

    Args:
        path: as in `load_checkpoint`.
        headless: accept a backbone without classes.
    """
    checkpoint = open_checkpoint(path)
    model: Any = load_model(checkpoint)
    if model.num_classes == 0 and not headless:
        raise CheckpointError(f"{checkpoint.path}: expected a classifier, got a backbone without classes")
    preprocessing = checkpoint.preprocessing or Preprocessing.from_timm(model.pretrained_cfg)
    classes = None if checkpoint.larger else checkpoint.classes
    if classes is None:
        count = model.num_classes
        classes = imagenet.class_ids() if count == len(imagenet.class_ids()) else tuple(map(str, range(count)))
    if len(classes) != model.num_classes:
        raise CheckpointError(f"{checkpoint.path}: expected {model.num_classes} class names, got {len(classes)}")
    return model, preprocessing, classes

"""Backbones from weight files, and their files."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo

from ppma.data.preprocessing import Preprocessing
from ppma.models.backbone import PolylineBackbone
from ppma.models.checkpoints import Checkpoint, CheckpointError, open_checkpoint, write_checkpoint
from ppma.models.checkpoints.weights import build, check_size


def save_checkpoint(
    model: PolylineBackbone,
    path: str | Path,
    *,
    preprocessing: Preprocessing | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write weights and configuration to one safetensors file, which `load_checkpoint` makes into a model again.

    Args:
        model: a backbone.
        path: of the file.
        preprocessing: how a classifier wants its images; together with
        classes: their names, in the order of the scores.
    """
    if not isinstance(model, PolylineBackbone):
        raise ValueError(f"model: expected a PolylineBackbone, got {type(model).__name__}")
    if (preprocessing is None) != (classes is None):
        raise ValueError("preprocessing, classes: expected both or neither, got one")
    if preprocessing is None or classes is None:
        write_checkpoint(path, model.state_dict(), model.config)
        return
    facts = {"classes": list(classes), **dataclasses.asdict(preprocessing)}
    write_checkpoint(path, model.state_dict(), model.config, task="classification", facts=facts)


def load_checkpoint(
    path: str | Path | Checkpoint, *, ema: bool = False, strict: bool = True, **overrides: Any
) -> PolylineBackbone:
    """A backbone from a weight file, ours (`save_checkpoint`, `ppma train`) or the authors', of any task.

    From the authors' files the architecture is inferred from the shapes and the model computes what their released
    code computes. Nothing in a file is executed.

    Args:
        path: a file of `torch.save` or safetensors, or an open one.
        ema: take the EMA weights of a training checkpoint.
        strict: whether names or shapes that do not fit are an error; else they are left out with a warning.
        overrides: fields of `BackboneConfig` to change, such as `num_classes` or `mask`.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: the file is damaged, needs code to load, or does not fit; the message names the keys.

    Example:
        >>> import tempfile, timm, ppma
        >>> model = timm.create_model("ppma_nano", num_classes=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ppma.save_checkpoint(model, f"{folder}/nano.safetensors")
        ...     ppma.load_checkpoint(f"{folder}/nano.safetensors").num_classes
        10
    """
    checkpoint = open_checkpoint(path)
    stored, config, state = checkpoint.backbone_weights(ema=ema, **overrides)
    source = str(checkpoint.path)
    check_size(stored, state, source=source)
    return build(lambda: PolylineBackbone(config), state, source=source, strict=strict)


def load_classifier(
    path: str | Path | Checkpoint, *, headless: bool = False
) -> tuple[PolylineBackbone, Preprocessing, tuple[str, ...]]:
    """A classifier, in evaluation mode, how it wants its images, and the names of its classes.

    A file that does not say it (the authors' do not) is used as the published models are: with ImageNet's classes if
    there are 1,000, else with numbers.

    Args:
        path: any file that `load_checkpoint` reads, or an open one.
        headless: take a backbone without classes too.
    """
    checkpoint = open_checkpoint(path)
    model = load_checkpoint(checkpoint)
    if model.num_classes == 0 and not headless:
        raise CheckpointError(f"{checkpoint.path}: expected a classifier, got a backbone without classes")
    preprocessing = checkpoint.preprocessing or Preprocessing.from_timm(model.pretrained_cfg)
    classes = None if checkpoint.larger else checkpoint.classes
    if classes is None:
        classes = _default_classes(model.num_classes)
    if len(classes) != model.num_classes:
        raise CheckpointError(
            f"{checkpoint.path}: expected the names of {model.num_classes} classes, got {len(classes)}"
        )
    return model, preprocessing, classes


def _default_classes(count: int) -> tuple[str, ...]:
    if count == 1000:
        info = ImageNetInfo()
        return tuple(info.index_to_label_name(index) for index in range(count))
    return tuple(map(str, range(count)))

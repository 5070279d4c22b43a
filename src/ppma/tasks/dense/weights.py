"""Weight files of dense models: weights, configurations of the backbone and of the run, class names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ppma import config as configs
from ppma.models import Checkpoint, CheckpointError, PolylineBackbone, open_checkpoint
from ppma.models.checkpoints import write_checkpoint
from ppma.models.checkpoints.weights import build, check_size
from ppma.models.loading import description
from ppma.models.timm_features import TimmFeatures
from ppma.tasks.dense.backbone import Backbone, dense_backbone, pretrained_backbone
from ppma.tasks.dense.config import DenseConfig

Schema = TypeVar("Schema")
Model = TypeVar("Model", bound=nn.Module)


def save_model(
    model: nn.Module,
    path: Path,
    backbone: Backbone,
    prefix: str,
    config: Any,
    classes: tuple[str, ...],
    *,
    task: str | None = None,
) -> None:
    """Write a file that `load_model` reads; `ppma.load_checkpoint` reads its backbone.

    Args:
        model: the complete model.
        path: output file.
        backbone: the backbone inside the model.
        prefix: prefix of the backbone's parameter names in the model.
        config: configuration of the run, or the parts of it that `load_model` reads.
        classes: class names.
        task: the task; None if `config` says it.
    """
    facts = {"config": configs.to_dict(config), "classes": classes}
    write_checkpoint(
        path, model.state_dict(), description(backbone), task=task or config.task, facts=facts, prefix=prefix
    )


def load_model(
    checkpoint: Checkpoint, task: str, schema: type[Schema], make: Callable[[Backbone, Schema, int], Model]
) -> tuple[Model, Schema, tuple[str, ...]]:
    """Load a file written by `save_model`.

    Args:
        checkpoint: an open file.
        task: the task the file must be for.
        schema: what to read of the run's configuration, a dataclass.
        make: builds the model from a backbone, the configuration and the number of classes.

    Returns:
        The model in evaluation mode, the configuration and the class names.
    """
    path, backbone, classes = checkpoint.path, checkpoint.backbone, checkpoint.classes
    timm_model = checkpoint.timm_model
    if (backbone is None and timm_model is None) or checkpoint.task != task:
        raise CheckpointError(f"{path}: expected a {task} model, found none")
    config = checkpoint.run_config(schema)
    if classes is None:
        raise CheckpointError(f"{path}: expected class names, found none")
    if backbone is not None:
        check_size(backbone, checkpoint.contents, source=str(path))

    def make_backbone() -> Backbone:
        if timm_model is not None:
            return TimmFeatures(timm_model)
        assert backbone is not None
        return PolylineBackbone(backbone)

    try:
        model = build(lambda: make(make_backbone(), config, len(classes)), checkpoint.contents, source=str(path))
    except ValueError as error:  # a model that this version of timm lacks
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: {error}") from None
    return model, config, classes


def starting_backbone(config: DenseConfig) -> Backbone:
    """The initial backbone of a run."""
    if config.start is not None:
        start = open_checkpoint(config.start)
        return pretrained_backbone(start, **config.start_args(start))
    return dense_backbone(config.model, pretrained=config.pretrained, **config.model_args)

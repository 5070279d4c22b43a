"""Weight files of dense models: weights, configurations of the backbone and of the run, class names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ppma import config as configs
from ppma.models import Checkpoint, CheckpointError, PolylineBackbone
from ppma.models.checkpoints import write_checkpoint
from ppma.models.checkpoints.weights import build, check_size
from ppma.tasks.dense.backbone import dense_backbone, pretrained_backbone
from ppma.tasks.dense.config import DenseConfig

Schema = TypeVar("Schema")
Model = TypeVar("Model", bound=nn.Module)


def save_model(
    model: nn.Module,
    path: Path,
    backbone: PolylineBackbone,
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
    write_checkpoint(path, model.state_dict(), backbone.config, task=task or config.task, facts=facts, prefix=prefix)


def load_model(
    checkpoint: Checkpoint, task: str, schema: type[Schema], make: Callable[[PolylineBackbone, Schema, int], Model]
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
    if backbone is None or checkpoint.task != task:
        raise CheckpointError(f"{path}: expected a {task} model, found none")
    config = checkpoint.run_config(schema)
    if classes is None:
        raise CheckpointError(f"{path}: expected class names, found none")
    check_size(backbone, checkpoint.contents, source=str(path))
    model = build(lambda: make(PolylineBackbone(backbone), config, len(classes)), checkpoint.contents, source=str(path))
    return model, config, classes


def starting_backbone(config: DenseConfig) -> PolylineBackbone:
    """The initial backbone of a run."""
    if config.init is not None:
        return pretrained_backbone(config.init, **config.model_args)
    return dense_backbone(config.model, **config.model_args)

"""Dense models as files: all weights, and beside them the backbone's configuration, the run's, and the classes."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import nn

from ppma import config as configs
from ppma.models import Checkpoint, CheckpointError, PolylineBackbone
from ppma.models.checkpoints import write_checkpoint
from ppma.models.checkpoints.weights import build, check_size
from ppma.tasks.dense.backbone import dense_backbone, pretrained_backbone
from ppma.tasks.dense.config import DenseConfig

Schema = TypeVar("Schema", bound=DenseConfig)
Model = TypeVar("Model", bound=nn.Module)


def save_model(
    model: nn.Module, path: Path, backbone: PolylineBackbone, prefix: str, config: DenseConfig, classes: tuple[str, ...]
) -> None:
    """Write a file from which the model can be made again; `ppma.load_checkpoint` finds the backbone in it.

    Args:
        model: the whole of it.
        path: of the file.
        backbone: a part of the model,
        prefix: and how the names of its weights begin there.
        config: of the run.
        classes: names.
    """
    facts = {"config": configs.to_dict(config), "classes": classes}
    write_checkpoint(path, model.state_dict(), backbone.config, task=config.task, facts=facts, prefix=prefix)


def load_model(
    checkpoint: Checkpoint, task: str, schema: type[Schema], make: Callable[[PolylineBackbone, Schema, int], Model]
) -> tuple[Model, Schema, tuple[str, ...]]:
    """A model that `save_model` wrote, in evaluation mode, with the run's configuration and the classes.

    Args:
        checkpoint: an open file.
        task: that it must be of.
        schema: of the configuration.
        make: builds the model from a backbone, the configuration and the number of classes.
    """
    path = checkpoint.path
    if not checkpoint.native and checkpoint.task == task:
        raise CheckpointError(f"{path}: expected a file of `ppma train`, got one of MMDetection")
    backbone, classes = checkpoint.backbone, checkpoint.classes
    if backbone is None or checkpoint.task != task:
        raise CheckpointError(f"{path}: expected a model trained for {task}, found none")
    config = checkpoint.run_config(schema)
    if classes is None:
        raise CheckpointError(f"{path}: expected the names of classes, found none")
    check_size(backbone, checkpoint.contents, source=str(path))
    model = build(lambda: make(PolylineBackbone(backbone), config, len(classes)), checkpoint.contents, source=str(path))
    return model, config, classes


def starting_backbone(config: DenseConfig) -> PolylineBackbone:
    """The backbone that a run starts with."""
    if config.init is not None:
        return pretrained_backbone(config.init, **config.model_args)
    return dense_backbone(config.model, **config.model_args)

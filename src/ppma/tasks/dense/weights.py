"""Dense models as files: all weights, and beside them the backbone's configuration, the run's, and the classes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ppma import config as configs
from ppma.models import BackboneConfig, CheckpointError, PolylineBackbone, files
from ppma.tasks.dense.backbone import dense_backbone, pretrained_backbone
from ppma.tasks.dense.config import DenseConfig

Schema = TypeVar("Schema", bound=DenseConfig)


@dataclass(frozen=True)
class StoredModel:
    """What a file holds.

    Attributes:
        state: weights by name.
        backbone: configuration of the backbone.
        config: of the run that made it, as plain values.
        classes: names.
    """

    state: dict[str, Tensor]
    backbone: BackboneConfig
    config: dict[str, Any]
    classes: tuple[str, ...]


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
    facts = json.dumps({"config": configs.to_dict(config), "classes": classes})
    files.write_native(
        path, model.state_dict(), backbone.config, {files.task_key(config.task): facts, files.BACKBONE_KEY: prefix}
    )


def read_model(path: str | Path, task: str) -> StoredModel:
    """Read what `save_model` wrote."""
    if not files.is_safetensors(path) and files.larger_model(path) == task:
        raise CheckpointError(f"{path}: expected a file of `ppma train`, got one of MMDetection")
    state, metadata = files.read_safetensors(path)
    backbone, key = files.config_in(metadata, str(path)), files.task_key(task)
    if backbone is None or key not in metadata:
        raise CheckpointError(f"{path}: expected a model trained for {task}, found none")
    facts = files.json_in(metadata, key, str(path))
    config, classes = facts.get("config"), facts.get("classes")
    if not isinstance(config, dict) or not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise CheckpointError(f"{path}: {key}: expected a configuration and the names of classes")
    files.check_size(backbone, state, source=str(path))
    return StoredModel(state, backbone, config, tuple(classes))


def checked_config(schema: type[Schema], stored: StoredModel, path: str | Path) -> Schema:
    """The configuration of a run as its file holds it."""
    try:
        return configs.build(schema, stored.config, source=str(path))
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(str(error) if isinstance(error, configs.ConfigError) else f"{path}: {error}") from None


def starting_backbone(config: DenseConfig) -> PolylineBackbone:
    """The backbone that a run starts with."""
    if config.init is not None:
        return pretrained_backbone(config.init, **config.model_args)
    return dense_backbone(config.model, **config.model_args)

"""Dense models as files: all weights, and beside them the backbone's configuration, the run's, and the classes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ppma import config as configs
from ppma.models import BackboneConfig, CheckpointError, PolylineBackbone, files
from ppma.tasks.dense.backbone import dense_backbone, pretrained_backbone
from ppma.tasks.dense.config import DenseConfig


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
    state, metadata = files.read_safetensors(path)
    backbone = files.config_in(metadata)
    if backbone is None or files.task_key(task) not in metadata:
        raise CheckpointError(f"{path}: expected a model trained for {task}, found none")
    facts = json.loads(metadata[files.task_key(task)])
    return StoredModel(state, backbone, facts["config"], tuple(facts["classes"]))


def starting_backbone(config: DenseConfig) -> PolylineBackbone:
    """The backbone that a run starts with."""
    if config.init is not None:
        return pretrained_backbone(config.init, **config.model_args)
    return dense_backbone(config.model, **config.model_args)

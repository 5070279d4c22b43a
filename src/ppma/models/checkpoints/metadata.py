"""Metadata of our safetensors files."""

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ppma.models.checkpoints.weights import CheckpointError
from ppma.models.config import BackboneConfig
from ppma.models.timm_models import TimmModel

_PREFIX = "ppma_"
CONFIG_KEY = f"{_PREFIX}config"  # the backbone's configuration
TIMM_KEY = f"{_PREFIX}timm"  # name and arguments of a model of timm, instead of the configuration
BACKBONE_KEY = f"{_PREFIX}backbone"  # prefix of the backbone's weights in the file of a larger model
_LONGEST_JSON = 16 << 20  # room for the names of a million classes


def task_key(task: str) -> str:
    """The metadata key of a task's entries."""
    return f"{_PREFIX}{task}"


def task_in(metadata: Mapping[str, str]) -> str | None:
    """The task in a file's metadata, None for a bare backbone."""
    others = (CONFIG_KEY, TIMM_KEY, BACKBONE_KEY)
    keys = sorted(key for key in metadata if key.startswith(_PREFIX) and key not in others)
    return keys[0].removeprefix(_PREFIX) if keys else None


def mapping(text: str, source: str) -> dict[str, Any]:
    """Parse a JSON object."""
    if len(text) > _LONGEST_JSON:
        raise CheckpointError(f"{source}: expected at most {_LONGEST_JSON:,} characters, got {len(text):,}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: expected JSON, got {reprlib.repr(text)} ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}: expected a mapping, got {type(values).__name__}")
    return values


def config_from(text: str, source: str) -> BackboneConfig:
    """Parse the JSON of a backbone's configuration."""
    try:
        return BackboneConfig.from_dict(mapping(text, source))
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{source}: {error}") from None


def describe(backbone: BackboneConfig | TimmModel) -> dict[str, str]:
    """The entry from which the backbone is rebuilt."""
    if isinstance(backbone, TimmModel):
        return {TIMM_KEY: json.dumps(dataclasses.asdict(backbone))}
    return {CONFIG_KEY: json.dumps(backbone.to_dict())}


def timm_model_from(text: str, source: str) -> TimmModel:
    """Parse the JSON of a model of timm."""
    try:
        return TimmModel(**mapping(text, source))
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{source}: {error}") from None


def encode_config(config: BackboneConfig) -> Tensor:
    """A configuration as a tensor (n,), uint8: a state dict has tensors only."""
    return torch.tensor(list(json.dumps(config.to_dict()).encode()), dtype=torch.uint8)


def decode_config(encoded: object, source: str) -> BackboneConfig:
    """The inverse of `encode_config`, also if the dtype of the whole state dict was changed."""
    if not isinstance(encoded, Tensor) or encoded.ndim != 1 or encoded.is_meta or encoded.numel() > _LONGEST_JSON:
        raise CheckpointError(f"{source}: expected the bytes of a configuration, got {reprlib.repr(encoded)}")
    try:
        text = bytes(encoded.round().to(torch.uint8).tolist() if encoded.is_floating_point() else encoded.tolist())
        return config_from(text.decode(), source)
    except (ValueError, TypeError, RuntimeError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{source}: {error}") from None

"""What the metadata of our safetensors files say, under which keys."""

import json
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ppma.models.checkpoints.weights import CheckpointError
from ppma.models.config import BackboneConfig

_PREFIX = "ppma_"
CONFIG_KEY = f"{_PREFIX}config"  # the backbone's configuration
BACKBONE_KEY = f"{_PREFIX}backbone"  # in the file of a larger model: how the names of its backbone's weights begin
_LONGEST_JSON = 16 << 20  # the names of a million classes


def task_key(task: str) -> str:
    """Where a file's metadata say what belongs to a task."""
    return f"{_PREFIX}{task}"


def task_in(metadata: Mapping[str, str]) -> str | None:
    """The task that a file's metadata name, None for a bare backbone."""
    keys = sorted(key for key in metadata if key.startswith(_PREFIX) and key not in (CONFIG_KEY, BACKBONE_KEY))
    return keys[0].removeprefix(_PREFIX) if keys else None


def mapping(text: str, source: str) -> dict[str, Any]:
    """A mapping from its JSON."""
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
    """A backbone's configuration from its JSON."""
    try:
        return BackboneConfig.from_dict(mapping(text, source))
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{source}: {error}") from None


def encode_config(config: BackboneConfig) -> Tensor:
    """A configuration as bytes (n,), uint8: weight files hold tensors and nothing else."""
    return torch.tensor(list(json.dumps(config.to_dict()).encode()), dtype=torch.uint8)


def decode_config(encoded: object, source: str) -> BackboneConfig:
    """The inverse; the bytes may have become numbers of another type where a whole state was cast."""
    if not isinstance(encoded, Tensor) or encoded.ndim != 1 or encoded.is_meta or encoded.numel() > _LONGEST_JSON:
        raise CheckpointError(f"{source}: expected the bytes of a configuration, got {reprlib.repr(encoded)}")
    try:
        text = bytes(encoded.round().to(torch.uint8).tolist() if encoded.is_floating_point() else encoded.tolist())
        return config_from(text.decode(), source)
    except (ValueError, TypeError, RuntimeError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{source}: {error}") from None

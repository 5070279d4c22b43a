"""Our format: a safetensors file whose metadata hold the configuration, so that one file makes a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ppma.atomic import write_atomically
from ppma.models.checkpoints.metadata import BACKBONE_KEY, CONFIG_KEY, task_key
from ppma.models.config import BackboneConfig

_LENGTH = 8  # bytes of the header's length, little-endian; the header itself is padded to a multiple of as many


def write_checkpoint(
    path: str | Path,
    state: Mapping[str, Tensor],
    config: BackboneConfig,
    *,
    task: str | None = None,
    facts: Mapping[str, Any] | None = None,
    prefix: str = "",
) -> None:
    """Write a file; one of that name is replaced only when the new one is complete.

    Args:
        path: of the file.
        state: weights by name.
        config: of the backbone.
        task: what the model was trained for, None for a bare backbone.
        facts: what belongs to the task: `classes`, and either the run's `config` or the fields of `Preprocessing`.
        prefix: how the names of the backbone's weights begin in a larger model.
    """
    metadata = {"format": "pt", CONFIG_KEY: json.dumps(config.to_dict())}
    if task is not None:
        metadata[task_key(task)] = json.dumps(facts or {})
    if prefix:
        metadata[BACKBONE_KEY] = prefix
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_atomically(Path(path), _sorted(safetensors.torch.save(tensors, metadata)))


def _sorted(content: bytes) -> bytes:
    """The same file with its metadata sorted: safetensors writes them in an order that differs between processes."""
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    header = json.loads(content[_LENGTH:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text + content[end:]

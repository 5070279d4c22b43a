"""Our file format: safetensors with the configuration in the metadata, so that one file rebuilds a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ppma.atomic import write_atomically
from ppma.models.checkpoints.metadata import BACKBONE_KEY, describe, task_key
from ppma.models.checkpoints.reader import Checkpoint
from ppma.models.checkpoints.weights import CheckpointError
from ppma.models.config import BackboneConfig
from ppma.models.timm_models import TimmModel

_LENGTH = 8  # bytes of the header's length, little-endian; the header is padded to a multiple of it


def write_checkpoint(
    path: str | Path,
    state: Mapping[str, Tensor],
    backbone: BackboneConfig | TimmModel,
    *,
    task: str | None = None,
    facts: Mapping[str, Any] | None = None,
    prefix: str = "",
) -> None:
    """Write a file atomically.

    Args:
        path: of the file.
        state: weights by name.
        backbone: from which it is rebuilt: its configuration, or its name in timm.
        task: that the model was trained for, None for a bare backbone.
        facts: entries of the task: `classes`, and either the run's `config` or the fields of `Preprocessing`.
        prefix: of the backbone's weights in a larger model.
    """
    metadata = {"format": "pt", **describe(backbone)}
    if task is not None:
        metadata[task_key(task)] = json.dumps(facts or {})
    if prefix:
        metadata[BACKBONE_KEY] = prefix
    write_safetensors(path, state, metadata)


def write_safetensors(path: str | Path, state: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write weights and metadata atomically, the same bytes each time."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_atomically(Path(path), _sorted(safetensors.torch.save(tensors, metadata)))


def write_half(source: Checkpoint, path: str | Path) -> None:
    """Write the weights of one of our files as float16, which models load as their own dtype.

    Args:
        source: an open file of our format.
        path: of the new file.

    Raises:
        CheckpointError: a weight exceeds the range of float16.
    """
    state = {}
    for name, tensor in source.contents.items():
        state[name] = tensor.half() if tensor.is_floating_point() else tensor
        if tensor.is_floating_point() and not torch.isfinite(state[name]).all():
            raise CheckpointError(f"{source.path}: {name}: expected weights in the range of float16")
    write_safetensors(path, state, dict(source.metadata))


def _sorted(content: bytes) -> bytes:
    """Sort a file's metadata, whose order in safetensors differs between processes."""
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    header = json.loads(content[_LENGTH:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text + content[end:]

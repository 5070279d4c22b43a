"""Weight files: our own format, and reading other people's without running what they pickled.

Our format is a safetensors file whose metadata holds the configuration, so that one file makes a model.
"""

import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ppma.atomic import write_atomically
from ppma.models.config import BackboneConfig
from ppma.models.safetensors_header import sort_metadata

WEIGHTS_NAME = "model.safetensors"
BACKBONE_KEY = "ppma_backbone"  # in the file of a larger model: how the names of its backbone's weights begin
MMSEGMENTATION_CLASSIFIER = "decode_head.conv_seg.weight"  # by which its segmentation models are known
_CONFIG_KEY = "ppma_config"


class CheckpointError(ValueError):
    """A weight file that cannot be used; the message says why."""


class _Inert:
    """Stands in for the objects that training programs store beside weights; holds and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


# Classes and functions that appear in honest training checkpoints: arguments, logs, numpy values.
_REPLACED = (
    "argparse.Namespace",
    "mmengine.config.config.ConfigDict",
    "mmengine.logging.history_buffer.HistoryBuffer",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
)


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: expected a weight file, found none at {path}")
    return path


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(f"{path}: not a weight file, or one that is cut short or damaged ({reason})")


def read_torch(path: str | Path) -> Any:
    """What a file of `torch.save` holds, tensors and plain containers only.

    Raises:
        CheckpointError: it is damaged, or holds objects that could only be loaded by running code.
    """
    path = _existing(path)
    inert: list[Any] = [(_Inert, name) for name in _REPLACED]
    try:
        with torch.serialization.safe_globals(inert):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error) or "WeightsUnpickler" in str(error) or "Unsupported" in str(error):
            raise CheckpointError(
                f"{path}: refused, because it holds more than tensors and loading that could run code. Load it where "
                f'you trust it and save its weights alone: torch.save({{"model": state_dict}}, ...). '
                f"PyTorch says: {str(error).splitlines()[0]}"
            ) from None
        raise _unreadable(path, error) from None
    except (RuntimeError, EOFError, OSError, KeyError, IndexError, ValueError) as error:
        raise _unreadable(path, error) from None


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    path = _existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def config_in(metadata: Mapping[str, str]) -> BackboneConfig | None:
    """The configuration in a file's metadata, None for a file that is not of our format."""
    return BackboneConfig.from_dict(json.loads(metadata[_CONFIG_KEY])) if _CONFIG_KEY in metadata else None


def task_key(task: str) -> str:
    """Where a file's metadata say what belongs to a task."""
    return f"ppma_{task}"


def backbone_part(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights of the backbone, in its own names; all of them unless the file is that of a larger model."""
    prefix = metadata.get(BACKBONE_KEY, "")
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def read_native(path: str | Path) -> tuple[dict[str, Tensor], BackboneConfig]:
    """Weights and configuration of a file in our format."""
    state, metadata = read_safetensors(path)
    config = config_in(metadata)
    if config is None:
        raise CheckpointError(f"{path}: expected a configuration ({_CONFIG_KEY}) in the file's metadata, found none")
    return state, config


def write_native(
    path: str | Path, state: Mapping[str, Tensor], config: BackboneConfig, extra: Mapping[str, str] | None = None
) -> None:
    """Write our format, with `extra` metadata; a file of that name is replaced only when the new one is complete."""
    metadata = {"format": "pt", _CONFIG_KEY: json.dumps(config.to_dict()), **(extra or {})}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_atomically(Path(path), sort_metadata(safetensors.torch.save(tensors, metadata)))


def load_weights(model: nn.Module, state: Mapping[str, Tensor], *, source: str, strict: bool = True) -> None:
    """Load weights into a model.

    Args:
        model: takes the weights.
        state: weights by name.
        source: named in messages.
        strict: whether names or shapes that do not fit are a CheckpointError; else they are left out with a warning.
    """
    own = model.state_dict()
    problems = {
        "missing": sorted(own.keys() - state.keys()),
        "unexpected": sorted(state.keys() - own.keys()),
        "mis-shaped": sorted(
            f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
            for name in own.keys() & state.keys()
            if own[name].shape != state[name].shape
        ),
    }
    text = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names)
    if text and strict:
        raise CheckpointError(f"{source}: the weights do not fit the model. {text}")
    if text:
        warnings.warn(f"{source}: loaded without what does not fit. {text}", stacklevel=3)
    fitting = {name: state[name] for name in own if name in state and state[name].shape == own[name].shape}
    model.load_state_dict(fitting, strict=False)

"""Checks of a file's weights against the model they are loaded into: names, shapes, values.

A file may be damaged or hostile: sizes it claims are checked against the file before memory is allocated.
"""

import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ppma.models.config import BackboneConfig

EXTRA_STATE = "_extra_state"  # PyTorch's key of a module's `get_extra_state`
_LONGEST_MESSAGE = 1500
_NAMED = 5  # keys listed in a message
_SHARED = 4  # how many times over a state may use the same memory
_MOST_FRESH = 1 << 28  # weights that may keep their initial values if not strict: a head of a million classes
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Model = TypeVar("Model", bound=nn.Module)


class CheckpointError(ValueError):
    """A weight file that cannot be used; the message says why in one line, whatever strings the file contains."""

    def __init__(self, message: str) -> None:
        line = "".join(character if character.isprintable() else " " for character in message[: 2 * _LONGEST_MESSAGE])
        super().__init__(line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} ...")


def unreadable(path: object, reason: object) -> CheckpointError:
    """The error for a file that failed to read, with the reason."""
    first = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
    return CheckpointError(f"{path}: not a weight file, or damaged ({first[:300]})")


def check_tensors(state: Mapping[Any, Any], *, source: str) -> None:
    """Raise a CheckpointError for names and tensors that cannot be weights, without reading values."""
    storages: dict[int, int] = {}
    total = 0
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{source}: expected strings as names of weights, got {reprlib.repr(name)}")
        where = f"{source}: {name[:200]}"
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{where}: expected a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise CheckpointError(f"{where}: expected a dense tensor, got {tensor.layout}, {tensor.dtype}")
        if tensor.is_meta:
            raise CheckpointError(f"{where}: expected values, got a tensor on the meta device")
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # a few bytes expanded to a large shape
            raise CheckpointError(
                f"{where}: expected {tensor.nbytes:,} bytes for the shape {tuple(tensor.shape)}, "
                f"got {tensor.untyped_storage().nbytes():,}"
            )
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        total += tensor.nbytes
    if total > _SHARED * sum(storages.values()):
        raise CheckpointError(f"{source}: expected {total:,} bytes of weights, got {sum(storages.values()):,}")


def _check_values(name: str, tensor: Tensor, own: Tensor, source: str) -> None:
    """Weights must be finite and floating-point, counters integers."""
    if own.is_floating_point():
        if tensor.dtype not in _FLOATING:
            raise CheckpointError(f"{source}: {name}: expected floating-point weights, got {tensor.dtype}")
        # in the dtype of the model: 1e300 is finite in float64 and infinite in float32
        if not torch.isfinite(tensor.to(own.dtype)).all():
            raise CheckpointError(f"{source}: {name}: expected finite weights, got NaN or infinity")
    elif tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise CheckpointError(f"{source}: {name}: expected {own.dtype}, got {tensor.dtype}")


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(name[:200] for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def without_extra_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the entries of `get_extra_state`."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(EXTRA_STATE)}


def select_weights(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], *, source: str, strict: bool = True
) -> dict[str, Tensor]:
    """The weights that a model takes, checked.

    Args:
        own: the model's own `state_dict()`, which may be on the meta device.
        state: weights by name.
        source: of the weights, for messages.
        strict: raise a CheckpointError for missing, unexpected and mis-shaped weights. Otherwise warn and leave them
            out, but raise if more than half of the model's are missing.
    """
    state, own = without_extra_state(state), without_extra_state(own)
    check_tensors(state, source=source)
    problems = {
        "missing": sorted(own.keys() - state.keys()),
        "unexpected": sorted(state.keys() - own.keys()),
        "mis-shaped": sorted(
            f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
            for name in own.keys() & state.keys()
            if own[name].shape != state[name].shape
        ),
    }
    found = {name: state[name] for name in own if name in state and state[name].shape == own[name].shape}
    text = "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names)
    fresh = sum(tensor.numel() for name, tensor in own.items() if name not in found)
    if text and (strict or 2 * len(found) < len(own) or fresh > _MOST_FRESH):
        raise CheckpointError(f"{source}: the weights do not fit the model. {text}")
    if text:
        warnings.warn(f"{source}: some weights were not loaded. {text}", stacklevel=4)
    for name, tensor in found.items():
        _check_values(name, tensor, own[name], source)
    return found


def load_weights(model: nn.Module, state: Mapping[str, Tensor], *, source: str, strict: bool = True) -> None:
    """Load weights into a model; arguments as in `select_weights`."""
    model.load_state_dict(select_weights(model.state_dict(), state, source=source, strict=strict), strict=False)


def build(make: Callable[[], Model], state: Mapping[str, Tensor], *, source: str, strict: bool = True) -> Model:
    """Build a model with these weights, in evaluation mode.

    The file also determines the model's size. The model is therefore first built on the meta device, which takes no
    memory, and compared with the weights.

    Args:
        make: builds the model.
        state: weights by name.
        source: of the weights, for messages.
        strict: as in `select_weights`.
    """
    try:
        with torch.device("meta"):
            shadow = make()
    except (RuntimeError, OverflowError) as error:  # more elements than a tensor can have
        raise CheckpointError(f"{source}: cannot be built: {str(error).splitlines()[0]}") from None
    found = select_weights(shadow.state_dict(), state, source=source, strict=strict)
    model = make()
    model.load_state_dict(found, strict=False)
    return model.eval()


def check_size(config: BackboneConfig, state: Mapping[str, Tensor], *, source: str) -> None:
    """Raise a CheckpointError for a configuration with more blocks than the file has tensors, before building them."""
    if sum(config.depths) > len(state):
        raise CheckpointError(f"{source}: expected weights of {sum(config.depths)} blocks, got {len(state)} tensors")

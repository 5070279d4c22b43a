"""Weights that a file holds against the model they are for: names, shapes, values.

A file may be damaged or hostile: what it says about sizes is checked against the file itself before memory is spent.
"""

import contextlib
import reprlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ppma.models.config import BackboneConfig

EXTRA_STATE = "_extra_state"  # PyTorch's name for what a module's state holds beside tensors of its own
_LONGEST_MESSAGE = 1500
_NAMED = 5  # how many keys a message lists
_SHARED = 4  # how often the weights of one state may use the same memory
_MOST_FRESH = 1 << 28  # weights that may start anew where a file need not fit: a head of a million classes
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Model = TypeVar("Model", bound=nn.Module)


class CheckpointError(ValueError):
    """A weight file that cannot be used; the message says why, in one line whatever the file's names and texts hold."""

    def __init__(self, message: str) -> None:
        line = "".join(character if character.isprintable() else " " for character in message[: 2 * _LONGEST_MESSAGE])
        super().__init__(line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} ...")


def unreadable(path: object, reason: object) -> CheckpointError:
    """The error for a file whose reader failed with `reason`."""
    first = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
    return CheckpointError(f"{path}: not a weight file, or one that is cut short or damaged ({first[:300]})")


def check_tensors(state: Mapping[Any, Any], *, source: str) -> None:
    """Refuse names and tensors that no weight can have, before their values are looked at."""
    storages: dict[int, int] = {}
    total = 0
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{source}: expected names of weights, got {reprlib.repr(name)}")
        where = f"{source}: {name[:200]}"
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{where}: expected a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise CheckpointError(f"{where}: expected a dense tensor, got {tensor.layout}, {tensor.dtype}")
        if tensor.is_meta:
            raise CheckpointError(f"{where}: expected values, got a tensor on the meta device, which has none")
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # a few bytes expanded into a shape of any size
            raise CheckpointError(
                f"{where}: expected {tensor.nbytes:,} bytes for the shape {tuple(tensor.shape)}, "
                f"got {tensor.untyped_storage().nbytes():,}"
            )
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        total += tensor.nbytes
    if total > _SHARED * sum(storages.values()):
        raise CheckpointError(f"{source}: expected {total:,} bytes of weights, got {sum(storages.values()):,}")


def _check_values(name: str, tensor: Tensor, own: Tensor, source: str) -> None:
    """Weights are finite numbers of a floating-point type; counters are whole numbers."""
    if own.is_floating_point():
        if tensor.dtype not in _FLOATING:
            raise CheckpointError(f"{source}: {name}: expected floating-point weights, got {tensor.dtype}")
        # in the type they are loaded as: 1e300 is a number in float64 and infinite in float32
        if not torch.isfinite(tensor.to(own.dtype)).all():
            raise CheckpointError(f"{source}: {name}: expected finite weights, got NaN or infinity")
    elif tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise CheckpointError(f"{source}: {name}: expected {own.dtype}, got {tensor.dtype}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def without_extra_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights alone."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(EXTRA_STATE)}


def fitting(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], *, source: str, strict: bool = True
) -> dict[str, Tensor]:
    """The weights that fit a model; each is checked.

    Args:
        own: the model's own `state_dict()`, which may be on the meta device.
        state: weights by name.
        source: named in messages.
        strict: whether names or shapes that do not fit are a CheckpointError; else they are left out with a warning,
            but if much of the model is missing it is still an error.
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
    text = "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names)
    fresh = sum(tensor.numel() for name, tensor in own.items() if name not in found)
    if text and (strict or 2 * len(found) < len(own) or fresh > _MOST_FRESH):
        raise CheckpointError(f"{source}: the weights do not fit the model. {text}")
    if text:
        warnings.warn(f"{source}: loaded without what does not fit. {text}", stacklevel=4)
    for name, tensor in found.items():
        _check_values(name, tensor, own[name], source)
    return found


def load_weights(model: nn.Module, state: Mapping[str, Tensor], *, source: str, strict: bool = True) -> None:
    """Load weights into a model; arguments as in `fitting`."""
    model.load_state_dict(fitting(model.state_dict(), state, source=source, strict=strict), strict=False)


def build(make: Callable[[], Model], state: Mapping[str, Tensor], *, source: str, strict: bool = True) -> Model:
    """A model with these weights, in evaluation mode.

    What to build comes from the file too, and may be of any size: it is first built on the meta device, without memory,
    and compared with the weights.

    Args:
        make: builds the model.
        state: weights by name.
        source: named in messages.
        strict: as in `fitting`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        try:
            shadow = make()
        except (RuntimeError, OverflowError) as error:  # more elements than a tensor can have
            raise CheckpointError(f"{source}: cannot be built: {str(error).splitlines()[0]}") from None
    found = fitting(shadow.state_dict(), state, source=source, strict=strict)
    model = make()
    model.load_state_dict(found, strict=False)
    return model.eval()


def check_size(config: BackboneConfig, state: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse a configuration with more blocks than the file has tensors; building them would take forever."""
    if sum(config.depths) > len(state):
        raise CheckpointError(f"{source}: expected weights of {sum(config.depths)} blocks, got {len(state)} tensors")

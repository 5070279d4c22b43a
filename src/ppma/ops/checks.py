"""Checks of arguments: a wrong one is a ValueError with its name, what was expected and what was given."""

import contextlib
import difflib
import os
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_validating: ContextVar[bool] = ContextVar("validating", default=os.environ.get("PPMA_VALIDATE", "") not in ("", "0"))
_first_call = True
_DECAY_DTYPES = (torch.float32, torch.float64)


@contextlib.contextmanager
def validation(enabled: bool = True) -> Iterator[None]:
    """Check values as well as shapes: log-decays <= 0 and not NaN, finite q, k, v and x.

    Each check costs a pass over the data, so they run only inside this context or with `PPMA_VALIDATE=1` in the
    environment, and never in compiled code. Otherwise log-decays are checked for values > 0 until a first call in a
    process passes: that finds decays passed in place of their logarithms, at no cost to later calls.

    Examples:
        >>> import torch, ppma
        >>> with ppma.validation():
        ...     ppma.polyline_mask(torch.ones(2, 2), torch.zeros(2, 2))
        Traceback (most recent call last):
        ...
        ValueError: log_alpha: expected values <= 0 (logarithms of decays in [0, 1]), got a largest value of 1
    """
    token = _validating.set(enabled)
    try:
        yield
    finally:
        _validating.reset(token)


def validating(tensor: Tensor) -> bool:
    """Whether the values of this tensor are checked now."""
    return not torch.compiler.is_compiling() and _validating.get() and _readable(tensor)


def one_of(name: str, value: object, valid: Collection[str]) -> None:
    """`value` must be one of the strings in `valid`."""
    if isinstance(value, str) and value in valid:
        return
    near = difflib.get_close_matches(str(value).lower(), list(valid), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}: expected one of {', '.join(map(repr, valid))}, got {value!r}{hint}")


def scale(value: object) -> None:
    """An attention scale is a number or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"scale: expected a number or None, got {type(value).__name__}")


def _tensor(name: str, value: object, shape: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor of shape {shape}, got {type(value).__name__}")


def _floating(name: str, value: Tensor) -> None:
    if not value.dtype.is_floating_point:
        raise ValueError(f"{name}: expected a floating-point tensor, got {value.dtype}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def decay_sequence(log_decays: object) -> dict[str, Tensor]:
    """Name the log-decays of an n-D call, which must be a non-empty sequence of tensors."""
    if isinstance(log_decays, Tensor) or not isinstance(log_decays, Sequence) or len(log_decays) == 0:
        given = "a tensor" if isinstance(log_decays, Tensor) else repr(type(log_decays).__name__)
        raise ValueError(
            f"log_decays: expected a sequence with one tensor for each grid axis, got {given}"
            if not isinstance(log_decays, Sequence)
            else "log_decays: expected at least one tensor, got an empty sequence"
        )
    return {f"log_decays[{axis}]": decay for axis, decay in enumerate(log_decays)}


def log_decays(named: dict[str, Tensor], axes: int) -> list[Tensor]:
    """Log-decays must be float32 or float64 and share grid, dtype and device; their batch axes are broadcast."""
    shape = "(..., H, W)" if axes == 2 else f"(..., {axes} grid axes)"
    first_name, first = next(iter(named.items()))
    for name, decay in named.items():
        _tensor(name, decay, shape)
        if decay.dtype not in _DECAY_DTYPES:
            raise ValueError(
                f"{name}: expected log-decays in float32 or float64 (they are sums of logarithms; half precision "
                f"would lose them), got {decay.dtype}"
            )
        if decay.ndim < axes:
            raise ValueError(f"{name}: expected shape {shape}, got {_shape(decay)}")
        if any(extent == 0 for extent in decay.shape[-axes:]):
            raise ValueError(f"{name}: expected a grid with at least one token, got shape {_shape(decay)}")
        if decay.shape[-axes:] != first.shape[-axes:]:
            raise ValueError(
                f"{name}: expected the grid {tuple(first.shape[-axes:])} of {first_name}, got shape {_shape(decay)}"
            )
        if decay.dtype != first.dtype:
            raise ValueError(f"{name}: expected {first.dtype} like {first_name}, got {decay.dtype}")
        same_device(name, decay, first_name, first)
    _decay_values(named)
    batch = broadcast_batch({name: decay.shape[:-axes] for name, decay in named.items()})
    return [decay.expand(*batch, *decay.shape[-axes:]) for decay in named.values()]


def _decay_values(named: dict[str, Tensor]) -> None:
    """Log-decays are <= 0: checked on the first call, and under validation, which refuses NaN too."""
    global _first_call
    if torch.compiler.is_compiling():  # before the context variable, which torch.compile of torch 2.6 cannot read
        return
    if not (_validating.get() or _first_call) or not all(map(_readable, named.values())):
        return
    for name, decay in named.items():
        largest = decay.detach().max() if decay.numel() else decay.new_zeros(())
        if _validating.get() and torch.isnan(largest):
            raise ValueError(f"{name}: expected values <= 0, got NaN")
        if largest > 0:
            raise ValueError(
                f"{name}: expected values <= 0 (logarithms of decays in [0, 1]), "
                f"got a largest value of {largest.item():g}"
            )
    _first_call = False  # a call that was refused is not the first one


def _readable(tensor: Tensor) -> bool:
    """Whether the values can be looked at: not in a graph that is being captured, nor under a transform or a mode."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not is_in_torch_dispatch_mode()
    )


def canonical(q: object, k: object, v: object, log_alpha: object, log_beta: object) -> bool:
    """Whether the tensors of an attention pass the checks of this module and need no broadcasting.

    The usual case, recognised in a fraction of the time of the checks, whose messages are for the others.
    """
    if torch.compiler.is_compiling() or _first_call or _validating.get():
        return False
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    if not (isinstance(log_alpha, Tensor) and isinstance(log_beta, Tensor)):
        return False
    shape, tokens, dtype, device = q.shape, q.shape[:-1], q.dtype, q.device
    return (
        len(shape) == 5
        and 0 not in shape[2:]
        and k.shape == shape
        and v.shape[:-1] == tokens
        and v.shape[-1] > 0
        and log_alpha.shape == tokens == log_beta.shape
        and dtype.is_floating_point
        and k.dtype == dtype == v.dtype
        and log_alpha.dtype == log_beta.dtype
        and log_alpha.dtype in _DECAY_DTYPES
        and k.device == device == v.device
        and log_alpha.device == device == log_beta.device
    )


def same_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Both tensors must be on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected device {other.device} like {other_name}, got {tensor.device}")


def values(name: str, tensor: object, grid: Sequence[int], like: tuple[str, Tensor] | None = None) -> None:
    """q, k, v or x: a floating-point tensor (..., *grid, channels), with dtype and device of `like`."""
    _tensor(name, tensor, "(..., *grid, channels)")
    assert isinstance(tensor, Tensor)
    _floating(name, tensor)
    if tensor.ndim < len(grid) + 1 or tuple(tensor.shape[-1 - len(grid) : -1]) != tuple(grid):
        expected = f"(..., {', '.join(map(str, grid))}, channels)"
        raise ValueError(f"{name}: expected shape {expected} on the grid of the log-decays, got {_shape(tensor)}")
    if tensor.shape[-1] == 0:
        raise ValueError(f"{name}: expected at least one channel, got shape {_shape(tensor)}")
    if like is not None:
        same_device(name, tensor, *like)
        if like[1].dtype != tensor.dtype:
            raise ValueError(f"{name}: expected {like[1].dtype} like {like[0]}, got {tensor.dtype}")
    if validating(tensor) and not torch.isfinite(tensor).all():
        raise ValueError(f"{name}: expected finite values, got NaN or infinity")


def valid(value: object, batch: Sequence[int], grid: Sequence[int], device: torch.device) -> None:
    """A key-padding mask: boolean, of the grid, with batch axes that broadcast to those of q without the heads."""
    given = type(value).__name__
    if isinstance(value, Tensor):
        given = f"{value.dtype} of shape {_shape(value)} on {value.device}"
        leading, missing = value.shape[:-2], len(batch) - (value.ndim - 2)
        if (
            (value.dtype, value.device, value.shape[-2:]) == (torch.bool, device, tuple(grid))
            and missing >= 0
            and all(a in (1, b) for a, b in zip(leading, batch[missing:], strict=True))
        ):
            return
    raise ValueError(
        f"valid: expected torch.bool of shape {(*batch, *grid)} on {device} (batch axes without heads, then the grid), "
        f"got {given}"
    )


def same_channels(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """The last axes must agree."""
    if tensor.shape[-1] != other.shape[-1]:
        raise ValueError(f"{name}: expected {other.shape[-1]} channels like {other_name}, got shape {_shape(tensor)}")


def broadcast_batch(shapes: dict[str, Sequence[int]]) -> tuple[int, ...]:
    """The common batch axes, by the usual broadcasting rules."""
    first, *others = shapes.values()
    # torch.broadcast_shapes takes longer than a small kernel; a comparison would fix sizes that a graph leaves open.
    if not torch.compiler.is_compiling() and all(shape == first for shape in others):
        return tuple(first)
    try:
        return tuple(torch.broadcast_shapes(*shapes.values()))
    except RuntimeError:
        given = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(f"batch axes: expected shapes that broadcast, got {given}") from None

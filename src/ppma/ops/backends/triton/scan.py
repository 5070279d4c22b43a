"""O(N) products with the mask: one scan along each grid axis, by strides, without permuted copies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppma.ops.backends.triton.launch import Config, cdiv, launch, next_power_of_2
from ppma.ops.backends.triton.scan_kernels import right_carries, scan_lines, scan_lines_backward
from ppma.ops.backends.triton.tiles import field, plane
from ppma.ops.options import NdPaths, axis_orders

# Tokens of a line held in registers; longer lines take several chunks. Beyond 64 the scan in registers spills.
LONGEST_CHUNK = 64
WIDEST_BLOCK = 32


def _lines(tensor: Tensor, axis: int) -> Tensor:
    """(B, heads, *grid, C) -> (B, heads, before, n, after, C), lines along `axis`; a view if strides allow."""
    batch, heads, *grid, channels = tensor.shape
    before, after = torch.Size(grid[:axis]).numel(), torch.Size(grid[axis + 1 :]).numel()
    return tensor.reshape(batch, heads, before, grid[axis], after, channels)


def _tile(n: int, channels: int) -> dict[str, int]:
    return {
        "CHUNK": min(LONGEST_CHUNK, max(8, next_power_of_2(n))),
        "BLOCK_D": min(WIDEST_BLOCK, max(8, next_power_of_2(channels))),
    }


def _launch(kernel: Any, x: Tensor, **arguments: Any) -> None:
    """Run a kernel with one program for each line and block of channels of x (B, heads, before, n, after, C)."""
    batch, heads, before, n, after, channels = x.shape
    tile = _tile(n, channels)
    default = max(1, min(4, tile["CHUNK"] * tile["BLOCK_D"] // 512))
    launch(
        kernel,
        (batch * heads * before * after * cdiv(channels, tile["BLOCK_D"]),),
        [Config(default), *(Config(warps) for warps in (1, 2, 4, 8) if warps != default)],
        x=field(x),
        heads=heads,
        lines=before * after,
        after=after,
        n=n,
        channels=channels,
        **tile,
        **arguments,
    )


def _carries(x: Tensor, log_decay: Tensor) -> Tensor:
    """What enters every chunk from the right, for lines longer than a chunk; else a tensor that is never read."""
    batch, heads, before, n, after, channels = x.shape
    chunks = cdiv(n, _tile(n, channels)["CHUNK"])
    lines = batch * heads * before * after if chunks > 1 else 0
    carries = torch.empty((lines, chunks, channels), dtype=torch.float32, device=x.device)
    if lines:
        _launch(right_carries, x, log_decay=plane(log_decay), carries=carries)
    return carries


def _scan_axis(x: Tensor, log_decay: Tensor, axis: int, dtype: torch.dtype, add: Tensor | None) -> Tensor:
    """The decay matrices of all lines along `axis` times x, plus `add`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    x, decay = _lines(x, axis), _lines(log_decay[..., None], axis)
    _launch(
        scan_lines,
        x,
        log_decay=plane(decay),
        carries=_carries(x, decay),
        add=None if add is None else field(_lines(add, axis)),
        out=field(_lines(out, axis)),
    )
    return out


def _scan_axis_backward(
    grad: Tensor, x: Tensor, log_decay: Tensor, axis: int, dtype: torch.dtype, add: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient of x (plus `add`), and of the log-decay in slots (slots, *log_decay.shape) to be summed."""
    grad_x = torch.empty(x.shape, dtype=dtype, device=x.device)
    grad, x, decay = _lines(grad, axis), _lines(x, axis), _lines(log_decay[..., None], axis)
    slots = cdiv(x.shape[-1], _tile(x.shape[3], x.shape[-1])["BLOCK_D"])
    grad_log = torch.empty((slots, *log_decay.shape), dtype=torch.float32, device=x.device)
    _launch(
        scan_lines_backward,
        x,
        grad=field(grad),
        log_decay=plane(decay),
        grad_carries=_carries(grad, decay),
        x_carries=_carries(x, decay),
        add=None if add is None else field(_lines(add, axis)),
        grad_x=field(_lines(grad_x, axis)),
        grad_log=plane(_lines(grad_log[0][..., None], axis)),
        slot_stride=log_decay.numel(),
    )
    return grad_x, grad_log


def polyline_scan(x: Tensor, log_decays: Sequence[Tensor], paths: NdPaths) -> Tensor:
    """X (B, heads, *grid, C), log_decays (B, heads, *grid) each -> like x."""
    orders = axis_orders(paths, len(log_decays))
    total: Tensor | None = None
    for order in orders:
        y = x
        for step, axis in enumerate(order):
            last = step == len(order) - 1
            # Only what is returned is rounded to the type of x.
            dtype = x.dtype if last and order is orders[-1] else torch.float32
            y = _scan_axis(y, log_decays[axis], axis, dtype, add=total if last else None)
        total = y
    assert total is not None
    return total


def polyline_scan_backward(grad: Tensor, x: Tensor, log_decays: Sequence[Tensor], paths: NdPaths) -> list[Tensor]:
    """Gradients of x and of each log-decay, recomputing the intermediate scans."""
    orders = axis_orders(paths, len(log_decays))
    grad_x: Tensor | None = None
    slots: list[list[Tensor]] = [[] for _ in log_decays]
    for order in orders:
        inputs = [x]
        for axis in order[:-1]:
            inputs.append(_scan_axis(inputs[-1], log_decays[axis], axis, torch.float32, add=None))
        flowing = grad
        for step, axis in enumerate(reversed(order)):
            last = step == len(order) - 1
            dtype = x.dtype if last and order is orders[-1] else torch.float32
            flowing, grad_log = _scan_axis_backward(
                flowing, inputs.pop(), log_decays[axis], axis, dtype, add=grad_x if last else None
            )
            slots[axis].append(grad_log)
        grad_x = flowing
    assert grad_x is not None
    return [grad_x, *(torch.cat(s).sum(0).to(decay.dtype) for s, decay in zip(slots, log_decays, strict=True))]

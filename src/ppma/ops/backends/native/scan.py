"""Decay scans on a grid of any number of axes: csrc/scan.cpp and csrc/scan_backward.cpp.

The kernels scan planes: all columns of a plane, or columns and rows in one go. The last two axes of the grid are one
plane; each axis before them is scanned by columns in the plane that it forms with the last.
"""

import ctypes
from ctypes import POINTER
from dataclasses import dataclass

import torch
from torch import Tensor

from ppma.ops.backends.native import library
from ppma.ops.backends.native.decays import edge_decays
from ppma.ops.backends.native.library import Kernel, address, contiguous_address
from ppma.ops.options import NdPaths

# `enum Mode` of csrc/plane_scan.h.
COLUMNS, V2H, H2V, BOTH = range(4)


class PlaneTensor(ctypes.Structure):
    """`struct PlaneTensor`: the data and its strides."""

    _fields_ = (("data", ctypes.c_void_p), ("strides", POINTER(ctypes.c_int64)))


class ScanParams(ctypes.Structure):
    """`struct ScanParams`."""

    _fields_ = (
        ("mode", ctypes.c_int64),
        ("batch_axes", ctypes.c_int64),
        ("sizes", POINTER(ctypes.c_int64)),
        *((name, PlaneTensor) for name in ("x", "alpha", "beta")),
        ("add", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


class ScanGradients(ctypes.Structure):
    """`struct ScanGradients`."""

    _fields_ = tuple((name, PlaneTensor) for name in ("out", "x", "alpha", "beta"))


_forward = Kernel("ppma_polyline_scan", POINTER(ScanParams), POINTER(PlaneTensor))
_backward = Kernel("ppma_polyline_scan_backward", POINTER(ScanParams), POINTER(ScanGradients))


def _longs(values: list[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


@dataclass(frozen=True)
class Stage:
    """One call of a kernel on planes of two grid axes.

    Attributes:
        mode: `enum Mode` of csrc/plane_scan.h.
        rows: the grid axis along which rows are counted, scanned by columns.
        columns: the grid axis along which columns are counted; None for planes of a single column.
    """

    mode: int
    rows: int
    columns: int | None

    @property
    def axes(self) -> list[int]:
        """The scanned axes: beta's, then alpha's."""
        return [self.rows] if self.mode == COLUMNS or self.columns is None else [self.rows, self.columns]

    def _order(self, grid_axes: int) -> list[int]:
        plane = [self.rows] if self.columns is None else [self.rows, self.columns]
        return [0, 1, *(axis + 2 for axis in range(grid_axes) if axis not in plane), *(axis + 2 for axis in plane)]

    def tensor(self, values: Tensor, shape: torch.Size) -> PlaneTensor:
        """`shape`, (B, heads, *grid, C), with the axes (batch..., H, W, C)."""
        strides = [values.stride(axis) for axis in self._order(values.ndim - 3)]
        if self.columns is None:
            strides.append(0)
        return PlaneTensor(address(values, shape), _longs([*strides, values.stride(-1)]))

    def edges(self, decay: Tensor, shape: torch.Size) -> PlaneTensor:
        """Contiguous, of the tokens of `shape`, (B, heads, *grid, C), with the axes (batch..., H)."""
        order = self._order(decay.ndim - 2)
        strides = [decay.stride(axis) for axis in (order if self.columns is None else order[:-1])]
        return PlaneTensor(contiguous_address(decay, shape[:-1]), _longs(strides))

    def params(self, x: Tensor, decays: list[Tensor], add: bool) -> ScanParams:
        """All the kernel needs but the results."""
        order = self._order(x.ndim - 3)
        sizes = [x.shape[axis] for axis in order]
        if self.columns is None:
            sizes.append(1)
        beta, alpha = self.edges(decays[self.rows], x.shape), self.edges(decays[self.axes[-1]], x.shape)
        return ScanParams(
            self.mode,
            len(sizes) - 2,
            _longs([*sizes, x.shape[-1]]),
            self.tensor(x, x.shape),
            alpha,
            beta,
            add,
            library.threads(),
        )


def _stages(paths: NdPaths, axes: int) -> list[list[Stage]]:
    """The stages of each path."""
    last = axes - 1
    if axes == 2:
        return [[Stage({"forward": V2H, "reverse": H2V, "both": BOTH}[paths], 0, 1)]]
    if axes == 1:
        forward = reverse = [Stage(COLUMNS, 0, None)]
    else:
        before = [Stage(COLUMNS, axis, last) for axis in range(axes - 2)]
        forward = [*before, Stage(V2H, last - 1, last)]
        reverse = [Stage(H2V, last - 1, last), *before[::-1]]
    return {"forward": [forward], "reverse": [reverse], "both": [forward, reverse]}[paths]


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _scan(stage: Stage, x: Tensor, decays: list[Tensor], out: Tensor | None = None, add: bool = False) -> Tensor:
    out = _empty(x) if out is None else out
    _forward(stage.params(x, decays, add), stage.tensor(out, x.shape))
    return out


def polyline_scan(x: Tensor, log_decays: list[Tensor], paths: NdPaths) -> Tensor:
    """The scans of x (B, heads, *grid, C) with log_decays (B, heads, *grid) each -> like x."""
    library.require_tokens(x.shape[2:])
    decays = [edge_decays(log_decay, axis) for axis, log_decay in enumerate(log_decays)]
    out = _empty(x)
    for number, stages in enumerate(_stages(paths, len(decays))):
        values = x
        for stage in stages[:-1]:
            values = _scan(stage, values, decays)
        _scan(stages[-1], values, decays, out, add=number > 0)
    return out


def polyline_scan_backward(grad: Tensor, x: Tensor, log_decays: list[Tensor], paths: NdPaths) -> list[Tensor]:
    """Gradients of x and of each log-decay, recomputing the scans between the stages."""
    library.require_tokens(x.shape[2:])
    decays = [edge_decays(log_decay, axis) for axis, log_decay in enumerate(log_decays)]
    grad_x = _empty(x)
    grad_decays = [torch.zeros(decay.shape, dtype=torch.float32, device=x.device) for decay in decays]
    for number, stages in enumerate(_stages(paths, len(decays))):
        inputs = [x]
        for stage in stages[:-1]:
            inputs.append(_scan(stage, inputs[-1], decays))
        grad_out = grad
        for stage in reversed(stages):
            first = stage is stages[0]
            values = inputs.pop()  # named, because the params hold only its address
            grad_in = grad_x if first else _empty(x)
            params = stage.params(values, decays, add=first and number > 0)
            gradients = ScanGradients(
                stage.tensor(grad_out, x.shape),
                stage.tensor(grad_in, x.shape),
                stage.edges(grad_decays[stage.axes[-1]], x.shape),
                stage.edges(grad_decays[stage.rows], x.shape),
            )
            _backward(params, gradients)
            grad_out = grad_in
    return [grad_x, *(g.to(d.dtype) for g, d in zip(grad_decays, log_decays, strict=True))]

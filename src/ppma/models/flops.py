"""FLOP formulas of the operators, for torch's FlopCounterMode, fvcore and `ppma.models.profile`.

Counters see an operator of `torch.ops.ppma` as one opaque node. The formulas count the products of the dense
formulation, as the published figures do: `q k^T` and `map v` once for full attention; for criss-cross attention the
scores within rows and columns once, and the products with v for each path. A multiply-add is one MAC, which torch
counts as two FLOPs and fvcore and the papers as one.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

import ppma.ops.backends.native.depthwise  # noqa: F401, registers its operator
from ppma.ops.options import NdPaths, Paths, axis_orders, split_paths

Shape = Sequence[int]


def attention_macs(q: Shape, v: Shape) -> int:
    """Full attention, q (B, heads, H, W, d) and v (B, heads, H, W, dv): N^2 (d + dv) per head."""
    tokens = q[2] * q[3]
    return q[0] * q[1] * tokens**2 * (q[4] + v[4])


def attention_backward_macs(q: Shape, v: Shape) -> int:
    """Recomputed scores, then the gradients of map, v, q and k."""
    tokens = q[2] * q[3]
    return q[0] * q[1] * tokens**2 * (3 * q[4] + 2 * v[4])


def criss_cross_macs(q: Shape, v: Shape, paths: Paths) -> int:
    """Criss-cross attention: N (H + W) (d + paths dv) per head."""
    return prod(q[:4]) * (q[2] + q[3]) * (q[4] + len(split_paths(paths)) * v[4])


def criss_cross_backward_macs(q: Shape, v: Shape, paths: Paths) -> int:
    """Recomputed scores, gradients of q and k; per path the recomputed inner product and gradients of maps and v."""
    inner = sum([q[2] if path == "v2h" else q[3] for path in split_paths(paths)])
    lines = q[2] + q[3]
    return prod(q[:4]) * (3 * lines * q[4] + (2 * lines * len(split_paths(paths)) + inner) * v[4])


def scan_macs(x: Shape, axes: int, paths: NdPaths) -> int:
    """A forward and a backward recurrence along each axis, per path."""
    return 2 * axes * len(axis_orders(paths, axes)) * prod(x)


def scan_backward_macs(x: Shape, axes: int, paths: NdPaths) -> int:
    """Recomputed scans, scans of the gradient, and the products for the gradients of the decays."""
    return 3 * scan_macs(x, axes, paths)


def linear_macs(q: Shape, v: Shape, paths: Paths) -> int:
    """Linear attention by Theorem 3: outer products of k and v, their scans, contraction with q."""
    return prod(q[:4]) * q[4] * v[4] * (2 + 4 * len(split_paths(paths)))


def linear_backward_macs(q: Shape, v: Shape, paths: Paths) -> int:
    """One linear attention with other operands for each of three gradients."""
    return 3 * linear_macs(q, v, paths)


def depthwise_macs(x: Shape, weight: Shape) -> int:
    """A depthwise convolution of x (B, H, W, C) with weight (C, 1, k, k)."""
    return prod(x) * prod(weight[2:])


# MACs of each operator from its arguments, with tensors replaced by their shapes.
Formula = Callable[[Sequence[Any]], int]
FORMULAS: Mapping[str, Formula] = {
    "polyline_attention": lambda a: attention_macs(a[0], a[2]),
    "polyline_attention_backward": lambda a: attention_backward_macs(a[1], a[3]),
    "criss_cross_attention": lambda a: criss_cross_macs(a[0], a[2], a[6]),
    "criss_cross_attention_backward": lambda a: criss_cross_backward_macs(a[1], a[3], a[7]),
    "polyline_scan": lambda a: scan_macs(a[0], len(a[1]), a[2]),
    "polyline_scan_backward": lambda a: scan_backward_macs(a[1], len(a[2]), a[3]),
    "linear_attention": lambda a: linear_macs(a[0], a[2], a[5]),
    "linear_attention_backward": lambda a: linear_backward_macs(a[1], a[3], a[6]),
    "depthwise_conv": lambda a: depthwise_macs(a[0], a[1]),
    "depthwise_conv_backward": lambda a: 2 * depthwise_macs(a[1], a[2]),
}


def _register(name: str, formula: Formula) -> None:
    @register_flop_formula(getattr(torch.ops.ppma, name))
    def flops(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
        return 2 * formula(shapes)


for _name, _formula in FORMULAS.items():
    _register(_name, _formula)


def fvcore_handles() -> dict[str, Callable[[list[Any], list[Any]], int]]:
    """Handles for `fvcore.nn.FlopCountAnalysis(...).set_op_handle(**fvcore_handles())`."""

    def shape_or_value(value: Any) -> Any:
        return value.type().sizes() if value.isCompleteTensor() else value.toIValue()

    def handle(formula: Formula) -> Callable[[list[Any], list[Any]], int]:
        return lambda inputs, outputs: formula([shape_or_value(value) for value in inputs])

    return {
        f"ppma::{name}": handle(FORMULAS[name])
        for name in ("polyline_attention", "criss_cross_attention", "linear_attention")
    }

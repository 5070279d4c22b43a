"""Criss-cross attention with the mask: fused masked attention along columns and along rows, chained.

With Av and Ah the masked maps within columns and within rows, V2H is `Ah (Av v)` and H2V is `Av (Ah v)`. For both
paths the row map is computed once and applied to v and to `Av v` together: three launches, nothing of size N x W kept.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppma.ops.backends.triton.configs import line_configs, line_tokens
from ppma.ops.backends.triton.launch import cdiv, check_channels, launch, padded, precision
from ppma.ops.backends.triton.line_kernels import line_backward, line_forward
from ppma.ops.backends.triton.potentials import gradients, potentials
from ppma.ops.backends.triton.tiles import Field, field, padding_plane, plane
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import AttentionOptions

COLUMNS, ROWS = 2, 3  # the axis along which a line runs


class _Applied(NamedTuple):
    """A map that was applied, out = map @ value, and the gradient of out."""

    value: Tensor | None
    out: Tensor | None
    grad: Tensor | None


class _Gradients(NamedTuple):
    """Gradients of q, of k, and of the values that a map was applied to."""

    q: Tensor | None
    k: Tensor | None
    value: Tensor | None
    second: Tensor | None = None


NOT_APPLIED = _Applied(None, None, None)
NO_GRADIENTS = _Gradients(None, None, None)


class _Lines:
    """All lines along one grid axis, and the attention maps within them.

    With `kept`, for the backward pass, `apply` leaves the largest logit and the inverse sum of each softmax in `stats`,
    and `moved` receives the gradients of the potentials, from the queries and from the keys.
    """

    def __init__(
        self,
        axis: int,
        q: Tensor,
        k: Tensor,
        potential: Tensor,
        valid: Tensor | None,
        options: AttentionOptions,
        kept: bool,
    ) -> None:
        self.axis, self.q, self.k, self.valid = axis, q, k, valid
        self.combine, _, self.scale, _ = options
        self.potential = potential
        if kept:
            shape = (2, 2, *potential.shape[1:])
            self.stats, self.moved = torch.empty(shape, dtype=torch.float32, device=q.device).unbind(0)
        self.kept = kept

    def _tokens(self, tensor: Tensor | None) -> Field | None:
        """(B, heads, H, W, channels) as (B, heads, lines, positions, channels)."""
        if tensor is None:
            return None
        return field(tensor if self.axis == ROWS else tensor.transpose(2, 3))

    def _plane(self, tensor: Tensor) -> Field:
        """(planes, B, heads, H, W) as (planes, B, heads, lines, positions)."""
        return plane(tensor if self.axis == ROWS else tensor.transpose(3, 4))

    def _valid(self, heads: int) -> Field:
        """(B, H, W) as (1, B, heads, lines, positions)."""
        assert self.valid is not None
        return padding_plane(self.valid if self.axis == ROWS else self.valid.transpose(1, 2), heads)

    def _launch(self, kernel: Any, kind: str, dv: int, **arguments: Any) -> None:
        batch, heads, *_, d = self.q.shape
        n = self.q.shape[self.axis]
        lines = self.q.shape[COLUMNS + ROWS - self.axis]
        channels = padded(max(d, dv))
        tokens = line_tokens(n, self.q.dtype, channels)
        launch(
            kernel,
            (batch * heads * lines * cdiv(n, tokens),),
            line_configs(kind, self.q.dtype, n, channels),
            potential=self._plane(self.potential),
            valid=None if self.valid is None else self._valid(heads),
            stats=self._plane(self.stats) if self.kept else None,
            heads=heads,
            lines=lines,
            n=n,
            scale=self.scale,
            MODE=self.combine,
            BLOCK_M=tokens,
            D=d,
            DV=dv,
            BLOCK_D=padded(d),
            BLOCK_DV=padded(dv),
            PRECISION=precision(self.q),
            **arguments,
        )

    def apply(self, value: Tensor, add: Tensor | None = None, share: float = 1.0) -> Tensor:
        """`share * (map @ value + add)`."""
        return self.apply_twice(value, None, add, share)[0]

    def apply_twice(
        self, value: Tensor, second: Tensor | None, add: Tensor | None = None, share: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """`share * (map @ value + add)` and `map @ second`."""
        out = heads_last_empty(value, value.shape[-1])
        second_out = out if second is None else heads_last_empty(value, value.shape[-1])
        self._launch(
            line_forward,
            "forward",
            value.shape[-1],
            q=self._tokens(self.q),
            k=self._tokens(self.k),
            v=self._tokens(value),
            second_v=self._tokens(second),
            add=self._tokens(add),
            out=self._tokens(out),
            second_out=self._tokens(second_out),
            share=share,
        )
        return out, second_out

    def apply_transposed(self, grad: Tensor) -> Tensor:
        """`map^T @ grad`. The maps are those of an `apply` before."""
        out = heads_last_empty(grad, grad.shape[-1])
        applied = _Applied(value=None, out=None, grad=grad)
        self._launch_keys("transposed", applied, NOT_APPLIED, None, NO_GRADIENTS, _Gradients(None, None, out))
        return out

    def backward(
        self,
        applied: _Applied,
        second: _Applied = NOT_APPLIED,
        add: _Gradients = NO_GRADIENTS,
        both: bool = False,
        share: float = 1.0,
    ) -> _Gradients:
        """Gradients of all that went into a map that was applied to one value or to two.

        Args:
            applied: what the map was applied to.
            second: what it was applied to as well.
            add: gradients from elsewhere, to be added.
            both: also compute the gradient of the second value.
            share: factor on the gradients of q, k and the first value.
        """
        q, k, value = self.q, self.k, applied.value
        grads = _Gradients(
            heads_last_empty(q, q.shape[-1]),
            heads_last_empty(k, k.shape[-1]),
            heads_last_empty(value, value.shape[-1]),
            heads_last_empty(value, value.shape[-1]) if both else None,
        )
        delta = torch.empty(self.potential.shape, dtype=torch.float32, device=q.device)
        self._launch(
            line_backward,
            "queries",
            value.shape[-1],
            fixed_a=self._tokens(q),
            other_a=self._tokens(k),
            fixed_b=self._tokens(applied.grad),
            other_b=self._tokens(applied.value),
            second_fixed_b=self._tokens(second.grad),
            second_other_b=self._tokens(second.value),
            out=self._tokens(applied.out),
            second_out=self._tokens(second.out),
            delta=self._plane(delta),
            add_a=self._tokens(add.q),
            add_b=None,
            grad_a=self._tokens(grads.q),
            grad_b=None,
            second_grad_b=None,
            moved=self._plane(self.moved[:1]),
            share=share,
            KEY_SIDE=False,
        )
        self._launch_keys("keys", applied, second, delta, add, grads, share)
        return grads

    def _launch_keys(
        self,
        kind: str,
        applied: _Applied,
        second: _Applied,
        delta: Tensor | None,
        add: _Gradients,
        grads: _Gradients,
        share: float = 1.0,
    ) -> None:
        assert applied.grad is not None
        self._launch(
            line_backward,
            kind,
            applied.grad.shape[-1],
            fixed_a=self._tokens(self.k),
            other_a=self._tokens(self.q),
            fixed_b=self._tokens(applied.value),
            other_b=self._tokens(applied.grad),
            second_fixed_b=self._tokens(second.value),
            second_other_b=self._tokens(second.grad),
            out=None,
            second_out=None,
            delta=None if delta is None else self._plane(delta),
            add_a=self._tokens(add.k),
            add_b=self._tokens(add.value),
            grad_a=self._tokens(grads.k),
            grad_b=self._tokens(grads.value),
            second_grad_b=self._tokens(grads.second),
            moved=self._plane(self.moved[1:]),
            share=share,
            KEY_SIDE=True,
        )


def _rows_and_columns(
    q: Tensor,
    k: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None,
    kept: bool,
) -> tuple[_Lines, _Lines]:
    alpha, beta = potentials(log_alpha, log_beta, options.combine)
    return _Lines(ROWS, q, k, alpha, valid, options, kept), _Lines(COLUMNS, q, k, beta, valid, options, kept)


def criss_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> Tensor:
    """q, k (B, heads, H, W, d), v (B, heads, H, W, dv), log-decays (B, heads, H, W) -> (B, heads, H, W, dv)."""
    paths = options.paths
    check_channels(q, v)
    rows, columns = _rows_and_columns(q, k, log_alpha, log_beta, options, valid, kept=False)
    if paths == "v2h":
        return rows.apply(columns.apply(v))
    if paths == "h2v":
        return columns.apply(rows.apply(v))
    along_rows, v2h = rows.apply_twice(v, columns.apply(v))
    return columns.apply(along_rows, add=v2h, share=options.path_weight)


def criss_cross_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta, recomputing the chain."""
    paths = options.paths
    check_channels(q, v)
    rows, columns = _rows_and_columns(q, k, log_alpha, log_beta, options, valid, kept=True)
    share = options.path_weight  # of the output, and of all gradients: they are linear in that of the output
    if paths == "2d":
        down = columns.apply(v)
        across, across_down = rows.apply_twice(v, down)
        down_across = columns.apply(across)
        grad_across = columns.apply_transposed(grad)
        partial = rows.backward(
            _Applied(down, across_down, grad), _Applied(v, across, grad_across), both=True
        )  # partial.value belongs to `down`, partial.second to v
        grads = columns.backward(
            _Applied(v, down, partial.value),
            _Applied(across, down_across, grad),
            add=_Gradients(partial.q, partial.k, partial.second),
            share=share,
        )
    else:
        first, second = (columns, rows) if paths == "v2h" else (rows, columns)
        inner = first.apply(v)
        partial = second.backward(_Applied(inner, second.apply(inner), grad))
        grads = first.backward(
            _Applied(v, inner, partial.value), add=_Gradients(partial.q, partial.k, None), share=share
        )
    assert grads.q is not None
    assert grads.k is not None
    assert grads.value is not None
    return grads.q, grads.k, grads.value, *gradients(rows.moved, columns.moved, log_alpha.dtype, share)

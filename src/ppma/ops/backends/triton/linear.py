"""Linear and decomposed attention with the mask, `((q k^T) * mask) v`: bands of grid rows, and states between them.

Within a band of rows the attention kernel computes scores times mask, as for a softmax. Between bands only a d x dv
state for each grid column is passed, down and up the grid: O(W d dv) memory for a head, whatever the height.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppma.ops.backends.triton.attention import Mask, make_mask, masked_backward, masked_forward, potential_slots
from ppma.ops.backends.triton.configs import state_configs
from ppma.ops.backends.triton.launch import cdiv, check_channels, launch, next_power_of_2, padded, precision
from ppma.ops.backends.triton.potentials import Slots, gradients
from ppma.ops.backends.triton.state_kernels import pass_states, read_far, read_near
from ppma.ops.backends.triton.tiles import Field, field, plane
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import Paths

# Rows of a band. Within a band the work for a token grows with them; between bands it is that of about 2 d rows.
BAND_ROWS = 64
READ_COLS = 64


class _Band(NamedTuple):
    """Some grid rows, the last of them in the direction of passing, and that of the band passed before."""

    start: int
    rows: int
    reference: int
    last_reference: int | None


def _bands(height: int, down: bool) -> Iterator[_Band]:
    starts = range(0, height, BAND_ROWS)
    last: int | None = None
    for start in starts if down else reversed(starts):
        rows = min(BAND_ROWS, height - start)
        reference = start + rows - 1 if down else start
        yield _Band(start, rows, reference, last)
        last = reference


class _Moved(NamedTuple):
    """Where reading adds what the potentials receive, as in `masked_backward`; None of a path that is not taken."""

    alpha_own: Field | None = None
    alpha_corner: Field | None = None
    beta_own: Field | None = None
    beta_corner: Field | None = None

    @classmethod
    def take(cls, alpha: Slots, beta: Slots, across: int, near: bool, far: bool) -> "_Moved":
        return cls(
            alpha_own=alpha.take(1) if near else None,
            alpha_corner=alpha.take(across) if near else None,
            beta_own=beta.take(1) if far else None,
            beta_corner=beta.take(across) if near else None,
        )


class _OtherBands:
    """Reads, for every token with its vector f, the sources `a outer b` of all bands but its own.

    Args:
        f: (B, heads, H, W, d).
        a: (B, heads, H, W, d).
        b: (B, heads, H, W, dv).
        mask: potentials along the rows and the columns.
    """

    def __init__(self, f: Tensor, a: Tensor, b: Tensor, mask: Mask) -> None:
        self.f, self.a, self.b = f, a, b
        self.alpha, self.beta, _ = mask
        self.widths = (padded(f.shape[-1]), padded(b.shape[-1]))
        self.rows_tile = max(16, next_power_of_2(BAND_ROWS))

    def add_to(
        self, out: Tensor, near: bool, far: bool, second: Tensor | None = None, moved: _Moved | None = None
    ) -> None:
        """Add what is read to `out`.

        Args:
            out: (B, heads, H, W, dv) float32.
            near: read over paths along the token's row.
            far: read over paths along the token's column.
            second: (B, heads, H, W, dv), the tokens' other vectors, to compute the potentials' gradients too.
            moved: where these go.
        """
        batch, heads, height, width, _ = self.f.shape
        shape = (batch * heads, width, *self.widths)
        for path in (name for name, taken in (("near", near), ("far", far)) if taken):
            # One state is read while the other is written.
            before, after = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
            for down in (True, False):
                for band in _bands(height, down):
                    if band.last_reference is not None:
                        self._read(path, before, band, 1 if down else -1, out, second, moved or _Moved())
                    self._pass_on(path, before, after, band)
                    before, after = after, before

    def _launch(self, kernel: Any, programs: int, band: _Band, **arguments: Any) -> None:
        """Run a kernel with some programs for each head."""
        batch, heads, _, width, d = self.f.shape
        launch(
            kernel,
            (batch * heads * programs,),
            state_configs(kernel is not pass_states, self.f.dtype, max(self.widths)),
            beta=plane(self.beta),
            heads=heads,
            W=width,
            start=band.start,
            rows=band.rows,
            D=d,
            DV=self.b.shape[-1],
            BLOCK_D=self.widths[0],
            BLOCK_DV=self.widths[1],
            PRECISION=precision(self.f),
            **arguments,
        )

    def _pass_on(self, path: str, before: Tensor, after: Tensor, band: _Band) -> None:
        first = band.last_reference is None
        self._launch(
            pass_states,
            self.f.shape[3],
            band,
            a=field(self.a),
            b=field(self.b),
            alpha=plane(self.alpha),
            before=None if first else before,
            after=after,
            reference=band.reference,
            last_reference=band.reference if first else band.last_reference,
            MIXED=path == "far",
            ROWS=self.rows_tile,
            BLOCK_N=16,
        )

    def _read(
        self, path: str, states: Tensor, band: _Band, direction: int, out: Tensor, second: Tensor | None, moved: _Moved
    ) -> None:
        width = self.f.shape[3]
        arguments = {
            "fixed": field(self.f),
            "second": None if second is None else field(second),
            "states": states,
            "out": field(out),
            "reference": band.last_reference,
            "direction": direction,
        }
        if path == "far":
            self._launch(read_far, width, band, beta_own=moved.beta_own, ROWS=self.rows_tile, **arguments)
        else:
            self._launch(
                read_near,
                band.rows * cdiv(width, READ_COLS),
                band,
                alpha=plane(self.alpha),
                alpha_own=moved.alpha_own,
                alpha_corner=moved.alpha_corner,
                beta_corner=moved.beta_corner,
                COLS=READ_COLS,
                **arguments,
            )


def linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths) -> Tensor:
    """q, k (B, heads, H, W, d), v (B, heads, H, W, dv), log-decays (B, heads, H, W) -> (B, heads, H, W, dv)."""
    check_channels(q, v)
    mask = make_mask(q, v, log_alpha, log_beta, "linear")
    out = heads_last_empty(v, v.shape[-1])
    if q.shape[2] <= BAND_ROWS:
        masked_forward(q, k, v, mask, out, None, None, "linear", paths, 1.0)
        return out
    total = heads_last_empty(v, v.shape[-1], torch.float32)
    masked_forward(q, k, v, mask, total, None, None, "linear", paths, 1.0, BAND_ROWS)
    _OtherBands(q, k, v, mask).add_to(total, near=paths != "h2v", far=paths != "v2h")
    return out.copy_(total)


def linear_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha and log_beta.

    Those of q, k and v are linear attentions themselves: of (grad, v, k), (v, grad, q) and (k, q, grad), the last two
    with the transposed mask.
    """
    check_channels(q, v)
    height, width = q.shape[2:4]
    banded = height > BAND_ROWS
    band = BAND_ROWS if banded else None
    mask = make_mask(q, v, log_alpha, log_beta, "linear")
    v2h, h2v = paths != "h2v", paths != "v2h"
    within = potential_slots(q, v, paths, band)
    across = cdiv(width, READ_COLS)
    between = (int(v2h) + int(h2v)) * (1 + across) if banded else 0
    alpha_slots, beta_slots = Slots(within + between, log_alpha), Slots(within + between, log_beta)
    dtype = torch.float32 if banded else None
    grads = tuple(heads_last_empty(tensor, tensor.shape[-1], dtype) for tensor in (q, k, v))
    masked_backward(grad, q, k, v, mask, None, None, None, grads, alpha_slots, beta_slots, "linear", paths, 1.0, band)
    if banded:
        for slots in (alpha_slots, beta_slots):
            slots.buffer[within:].zero_()
        queries = _Moved.take(alpha_slots, beta_slots, across, near=v2h, far=h2v)
        keys = _Moved.take(alpha_slots, beta_slots, across, near=h2v, far=v2h)
        _OtherBands(grad, v, k, mask).add_to(grads[0], near=v2h, far=h2v, second=q, moved=queries)
        _OtherBands(v, grad, q, mask).add_to(grads[1], near=h2v, far=v2h, second=k, moved=keys)
        _OtherBands(k, q, grad, mask).add_to(grads[2], near=h2v, far=v2h)
        grads = tuple(
            heads_last_empty(tensor, tensor.shape[-1]).copy_(total)
            for tensor, total in zip((q, k, v), grads, strict=True)
        )
    return *grads, *gradients(alpha_slots.buffer, beta_slots.buffer, log_alpha.dtype)

"""Mamba2's structured mask (Section 3 of the paper): a line of tokens that look back only, in three equal forms.

The causal mask is `L[i, j] = a[j+1] ... a[i]` for i >= j and 0 above the diagonal; Mamba2 computes
`y = (L * (C B^T)) x`, here with q, k and v for C, B and x. A line of the polyline mask is the symmetric `L + L^T - 1`.

Plain PyTorch operations: any device, any number of derivatives, every transform, compilation and export.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops import checks
from ppma.ops.decay_matrix import log_decay_matrix
from ppma.ops.layout import compute_dtype

CausalForm = Literal["recurrent", "attention", "chunkwise"]
# Tokens that the chunkwise form takes together.
CHUNK = 64


def causal_mask(log_decay: Tensor, *, log: bool = False) -> Tensor:
    """Mamba2's mask of a line as a matrix: `L[i, j]` is the product of the decays from j to i, 0 for j > i.

    Args:
        log_decay: (..., n) float32 or float64, <= 0; -inf is a decay of 0. Entry i belongs to the edge before token i;
            the first lies outside the line and is never read.
        log: return the logarithm of the mask.

    Returns:
        (..., n, n): entry [query, key], in the dtype of the log-decays.

    Examples:
        >>> import torch, ppma
        >>> ppma.causal_mask(torch.tensor([0.0, 0.5, 0.5]).log())
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 1.0000, 0.0000],
                [0.2500, 0.5000, 1.0000]])
    """
    (log_decay,) = checks.log_decays({"log_decay": log_decay}, axes=1)
    later = _later(log_decay.shape[-1], log_decay.device)
    mask = log_decay_matrix(log_decay)
    mask = mask.masked_fill(later, -torch.inf) if log else mask.exp().masked_fill(later, 0.0)
    return mask.to(log_decay.dtype)


def causal_scan(x: Tensor, log_decay: Tensor, *, form: CausalForm = "chunkwise") -> Tensor:
    """The product of Mamba2's mask with x: the recurrence `y[i] = a[i] y[i-1] + x[i]`.

    Args:
        x: (..., n, C), any floating-point dtype.
        log_decay: (..., n), see `causal_mask`; batch axes broadcast.
        form: see `causal_attention`.

    Returns:
        (..., n, C) in the dtype of x.

    Examples:
        >>> import torch, ppma
        >>> ppma.causal_scan(torch.ones(3, 1), torch.tensor([0.0, 0.5, 0.5]).log()).flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    checks.values("x", x, x.shape[-2:-1])
    one = torch.ones((), dtype=x.dtype, device=x.device).expand(*x.shape[:-1], 1)
    return _run({"x": x, "q": one, "k": one}, log_decay, form)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, form: CausalForm = "chunkwise") -> Tensor:
    """Mamba2's layer without its projections: `(L * (q k^T)) v` with the causal mask L, no softmax and no scale.

    Args:
        q: (..., n, d), Mamba2's C; any floating-point dtype.
        k: (..., n, d), Mamba2's B.
        v: (..., n, dv), Mamba2's x.
        log_decay: (..., n), see `causal_mask`; batch axes broadcast.
        form: "recurrent", `h[i] = a[i] h[i-1] + k[i] v[i]^T, y[i] = q[i] h[i]`, O(n d dv) in n steps; "attention", with
            the matrix L, O(n^2); or "chunkwise" (SSD), the second within chunks and the first between them,
            O(n (chunk + d) dv) in n / chunk steps. All compute the same.

    Returns:
        (..., n, dv) in the dtype of v.

    Examples:
        >>> import torch, ppma
        >>> q, k, v = torch.randn(3, 2, 100, 8, dtype=torch.float64)
        >>> log_decay = -torch.rand(2, 100, dtype=torch.float64)
        >>> forms = [ppma.causal_attention(q, k, v, log_decay, form=f) for f in ("recurrent", "attention", "chunkwise")]
        >>> torch.allclose(forms[0], forms[1]) and torch.allclose(forms[0], forms[2])
        True
    """
    return _run({"v": v, "q": q, "k": k}, log_decay, form)


def _run(values: dict[str, Tensor], log_decay: Tensor, form: CausalForm) -> Tensor:
    """Check v (the first of the values), q and k, broadcast, and compute in float32 or float64."""
    checks.one_of("form", form, get_args(CausalForm))
    (log_decay,) = checks.log_decays({"log_decay": log_decay}, axes=1)
    name, v = next(iter(values.items()))
    for other, tensor in values.items():
        checks.values(other, tensor, log_decay.shape[-1:], like=None if tensor is v else (name, v))
    checks.same_device(name, v, "log_decay", log_decay)
    checks.same_channels("k", values["k"], "q", values["q"])
    shapes = {other: tensor.shape[:-2] for other, tensor in values.items()}
    batch = checks.broadcast_batch({**shapes, "log_decay": log_decay.shape[:-1]})
    dtype = compute_dtype(v.dtype)
    with torch.autocast(v.device.type, enabled=False):
        q, k, v = (values[other].expand(*batch, *values[other].shape[-2:]) for other in ("q", "k", name))
        out = _FORMS[form](q.to(dtype), k.to(dtype), v.to(dtype), log_decay.expand(*batch, -1))
        return out.to(v.dtype)


def _recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    outside = torch.arange(v.shape[-2], device=v.device) == 0
    decay = log_decay.masked_fill(outside, -torch.inf).exp().to(v.dtype)[..., None, None]
    state, outs = torch.zeros((), dtype=v.dtype, device=v.device), []
    for i in range(v.shape[-2]):
        state = decay[..., i, :, :] * state + k[..., i, :, None] * v[..., i, None, :]
        outs.append((q[..., i, None, :] @ state).squeeze(-2))
    return torch.stack(outs, -2)


def _attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    later = _later(v.shape[-2], v.device)
    mask = log_decay_matrix(log_decay).exp().masked_fill(later, 0.0).to(v.dtype)
    return (q @ k.mT * mask) @ v


def _chunkwise(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    n = v.shape[-2]
    size = min(CHUNK, n)
    pad = -n % size  # tokens of zeros behind the last
    q, k, v = (F.pad(tensor, (0, 0, 0, pad)).unflatten(-2, (-1, size)) for tensor in (q, k, v))
    edges = F.pad(log_decay, (0, pad)).unflatten(-1, (-1, size))  # (..., chunks, size)
    # A line for each chunk that begins with the last token before it, so that its first edge is inside.
    decays = log_decay_matrix(F.pad(edges, (1, 0))).exp().to(v.dtype)
    from_before, within = decays[..., 1:, :1], decays[..., 1:, 1:].masked_fill(_later(size, v.device), 0.0)
    out = (q @ k.mT * within) @ v
    added = (k * within[..., -1, :, None]).mT @ v  # what each chunk leaves behind, (..., chunks, d, dv)
    outs = [out[..., 0, :, :]]
    state = added[..., 0, :, :]
    for chunk in range(1, v.shape[-3]):
        carried = from_before[..., chunk, :, :]
        outs.append(out[..., chunk, :, :] + carried * (q[..., chunk, :, :] @ state))
        state = carried[..., -1:, :] * state + added[..., chunk, :, :]
    return torch.cat(outs, -2)[..., :n, :]


_FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "recurrent": _recurrent,
    "attention": _attention,
    "chunkwise": _chunkwise,
}


def _later(n: int, device: torch.device) -> Tensor:
    """(n, n), True where the key comes after the query."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)

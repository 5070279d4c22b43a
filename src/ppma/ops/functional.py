"""The public operators: products with the mask and the four masked attentions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ppma.ops import backends, checks, reference, torch_ops
from ppma.ops.layout import autocast_dtype
from ppma.ops.options import COMBINES, ND_PATHS, BackendName, Combine, NdPaths, Paths


def _canonical(tensor: Tensor, batch: Sequence[int], kept: int) -> Tensor:
    """Expand to the common batch axes and make them two: (B, heads, ...). `kept` trailing axes stay as they are."""
    tensor = tensor.expand(*batch, *tensor.shape[tensor.ndim - kept :])
    while tensor.ndim < kept + 2:
        tensor = tensor.unsqueeze(0)
    return tensor if tensor.ndim == kept + 2 else tensor.flatten(0, tensor.ndim - kept - 2)


def _restore(out: Tensor, batch: Sequence[int]) -> Tensor:
    if len(batch) == 2:
        return out
    if len(batch) > 2:
        return out.unflatten(0, tuple(batch[:-1]))
    return out.squeeze(0) if len(batch) == 1 else out.squeeze(0).squeeze(0)


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Under autocast, values take its dtype; log-decays are sums of logarithms and stay as they are."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [tensor.to(dtype) for tensor in tensors]


def polyline_scan(
    x: Tensor, log_alpha: Tensor, log_beta: Tensor, *, paths: Paths = "2d", backend: BackendName = "auto"
) -> Tensor:
    """The product of the polyline path mask with x, never building the mask: O(N) time and memory.

    Equal to `polyline_mask(log_alpha, log_beta, paths=paths) @ x` over the tokens in raster order. The V2H mask is a
    scan of every column followed by a scan of every row (Theorem 2), H2V the other way round; gradients are scans too.

    Args:
        x: (..., H, W, C), any floating-point dtype.
        log_alpha: (..., H, W) float32 or float64, <= 0; -inf is a decay of 0. Batch axes broadcast.
        log_beta: (..., H, W).
        paths: "v2h", "h2v" or "2d" (their sum).
        backend: "auto", "reference", "torch", "native" or "triton".

    Returns:
        (..., H, W, C) in the dtype of x.

    Examples:
        >>> import torch, ppma
        >>> x = torch.ones(2, 2, 1)
        >>> half = torch.full((2, 2), 0.5).log()
        >>> ppma.polyline_scan(x, half, half, paths="v2h").flatten()
        tensor([2.2500, 2.2500, 2.2500, 2.2500])
    """
    checks.one_of("paths", paths, ND_PATHS)
    return _scan(x, {"log_beta": log_beta, "log_alpha": log_alpha}, ND_PATHS[paths], backend)


def polyline_scan_nd(
    x: Tensor, log_decays: Sequence[Tensor], *, paths: NdPaths = "both", backend: BackendName = "auto"
) -> Tensor:
    """The product of the n-dimensional polyline path mask with x: one scan along each grid axis, O(N).

    Args:
        x: (..., *grid, C), any floating-point dtype.
        log_decays: one (..., *grid) tensor for each grid axis, in axis order; batch axes broadcast.
        paths: "forward" scans the first axis first, "reverse" the last axis first, "both" is their sum.
        backend: "auto", "reference", "torch", "native" or "triton".

    Returns:
        (..., *grid, C) in the dtype of x.

    Examples:
        >>> import torch, ppma
        >>> impulse = torch.tensor([[0.0], [1.0], [0.0]])
        >>> line = torch.tensor([1.0, 0.5, 0.25]).log()
        >>> ppma.polyline_scan_nd(impulse, [line], paths="forward").flatten()
        tensor([0.5000, 1.0000, 0.2500])
    """
    checks.one_of("paths", paths, ("forward", "reverse", "both"))
    return _scan(x, checks.decay_sequence(log_decays), paths, backend)


def _scan(x: Tensor, named: dict[str, Tensor], paths: NdPaths, backend: BackendName) -> Tensor:
    checks.one_of("backend", backend, backends.NAMES)
    axes = len(named)
    log_decays = checks.log_decays(named, axes)
    first = next(iter(named))
    grid = log_decays[0].shape[-axes:]
    checks.values("x", x, grid)
    checks.same_device("x", x, first, log_decays[0])
    batch = checks.broadcast_batch({"x": x.shape[: -axes - 1], "the log-decays": log_decays[0].shape[:-axes]})
    x, decays = _canonical(x, batch, axes + 1), [_canonical(decay, batch, axes) for decay in log_decays]
    if backend == "reference":
        return _restore(reference.polyline_scan_nd(x, decays, paths=paths), batch)
    return _restore(torch_ops.run("polyline_scan", (x, *decays), paths, backend), batch)


def polyline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    *,
    combine: Combine = "hadamard",
    paths: Paths = "2d",
    scale: float | None = None,
    valid: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Full polyline path masked attention (Eq. 10): every token attends to every token.

    O(N^2) time, O(N) memory: the N x N map of a large grid is never stored, neither forward nor backward.

    Args:
        q: (..., heads, H, W, d), any floating-point dtype.
        k: (..., heads, H, W, d).
        v: (..., heads, H, W, dv).
        log_alpha: (..., heads, H, W) float32 or float64, <= 0; -inf is a decay of 0. Batch axes broadcast.
        log_beta: (..., heads, H, W).
        combine: "hadamard" (the paper): `(softmax(s) * mask) v`, paths summed. "logit" (the authors' release):
            `softmax(s + log mask) v`, one softmax for each path, paths averaged.
        paths: "v2h", "h2v" or "2d".
        scale: factor on `q k^T`; d**-0.5 if None.
        valid: boolean (..., H, W) without an axis of heads, False at padding: tokens that take no part as keys,
            whatever k and v hold there. Decays still multiply along paths through them. A query without any valid key
            gets 0. None: all tokens are valid.
        backend: "auto", "reference", "torch", "native" or "triton".

    Returns:
        (..., heads, H, W, dv) in the dtype of v.

    Examples:
        >>> import torch, ppma
        >>> q, k, v = torch.randn(3, 1, 4, 6, 6, 16)
        >>> log_alpha, log_beta = -torch.rand(2, 1, 4, 6, 6)
        >>> ppma.polyline_attention(q, k, v, log_alpha, log_beta).shape
        torch.Size([1, 4, 6, 6, 16])
    """
    tensors = (q, k, v, log_alpha, log_beta)
    return _softmax_attention("polyline_attention", tensors, combine, paths, scale, valid, backend)


def criss_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    *,
    combine: Combine = "hadamard",
    paths: Paths = "2d",
    scale: float | None = None,
    valid: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Polyline path masked criss-cross attention (Eqs. 11-12): within columns and within rows, O(N^1.5).

    V2H attends within every column and then within every row, H2V the other way round.

    Args:
        q: (..., heads, H, W, d), any floating-point dtype.
        k: (..., heads, H, W, d).
        v: (..., heads, H, W, dv).
        log_alpha: (..., heads, H, W) float32 or float64, <= 0; -inf is a decay of 0. Batch axes broadcast.
        log_beta: (..., heads, H, W).
        combine: "hadamard" (the paper; paths summed) or "logit" (the authors' release; paths averaged).
        paths: "v2h", "h2v" or "2d".
        scale: factor on `q k^T`; d**-0.5 if None.
        valid: boolean (..., H, W) without an axis of heads, False at padding; see `polyline_attention`. A token whose
            row or column has no valid key gets 0 from the attention within that line.
        backend: "auto", "reference", "torch", "native" or "triton".

    Returns:
        (..., heads, H, W, dv) in the dtype of v.

    Examples:
        >>> import torch, ppma
        >>> q, k, v = torch.randn(3, 1, 4, 8, 6, 16)
        >>> log_alpha, log_beta = -torch.rand(2, 1, 4, 8, 6)
        >>> ppma.criss_cross_attention(q, k, v, log_alpha, log_beta, combine="logit").shape
        torch.Size([1, 4, 8, 6, 16])
    """
    tensors = (q, k, v, log_alpha, log_beta)
    return _softmax_attention("criss_cross_attention", tensors, combine, paths, scale, valid, backend)


def _softmax_attention(
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    combine: Combine,
    paths: Paths,
    scale: float | None,
    valid: Tensor | None,
    backend: BackendName,
) -> Tensor:
    checks.one_of("combine", combine, COMBINES)
    checks.scale(scale)
    q, k, v, log_alpha, log_beta = inputs
    tensors, batch = _attention_inputs(("q", "k", "v"), (q, k, v), log_alpha, log_beta, paths, backend)
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if valid is not None:
        checks.valid(valid, batch[:-1], q.shape[-3:-1], q.device)
        valid = valid.expand(*batch[:-1], *q.shape[-3:-1])
        valid = valid.unsqueeze(0) if valid.ndim == 2 else valid.flatten(0, -3)
    if backend == "reference":
        out = getattr(reference, name)(*tensors, combine=combine, paths=paths, scale=factor, valid=valid)
    else:
        out = torch_ops.run(name, tensors, combine, paths, factor, backend, valid=valid)
    return _restore(out, batch)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    *,
    paths: Paths = "2d",
    backend: BackendName = "auto",
) -> Tensor:
    """Polyline path masked linear attention: `((q k^T) * mask) v`, no softmax and no scale, O(N d dv).

    Args:
        q: (..., heads, H, W, d), any floating-point dtype.
        k: (..., heads, H, W, d).
        v: (..., heads, H, W, dv).
        log_alpha: (..., heads, H, W) float32 or float64, <= 0; -inf is a decay of 0. Batch axes broadcast.
        log_beta: (..., heads, H, W).
        paths: "v2h", "h2v" or "2d".
        backend: "auto", "reference", "torch", "native" or "triton".

    Returns:
        (..., heads, H, W, dv) in the dtype of v.

    Examples:
        >>> import torch, ppma
        >>> q, k, v = torch.randn(3, 1, 4, 8, 6, 16)
        >>> log_alpha, log_beta = -torch.rand(2, 1, 4, 8, 6)
        >>> ppma.linear_attention(q, k, v, log_alpha, log_beta).shape
        torch.Size([1, 4, 8, 6, 16])
    """
    return _linear(("q", "k", "v"), (q, k, v), log_alpha, log_beta, paths, backend)


def decomposed_attention(
    s1: Tensor,
    s2: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    *,
    paths: Paths = "2d",
    backend: BackendName = "auto",
) -> Tensor:
    """Polyline path masked decomposed attention: `((S1 S2) * mask) v` for any attention of rank D, O(N D dv).

    Args:
        s1: (..., H, W, D), the rows of S1.
        s2: (..., H, W, D), the columns of S2.
        v: (..., H, W, dv).
        log_alpha: (..., H, W) float32 or float64, <= 0; -inf is a decay of 0. Batch axes broadcast.
        log_beta: (..., H, W).
        paths: "v2h", "h2v" or "2d".
        backend: "auto", "reference", "torch", "native" or "triton".

    Returns:
        (..., H, W, dv) in the dtype of v.

    Examples:
        >>> import torch, ppma
        >>> s1, s2 = torch.rand(2, 8, 6, 5)
        >>> v = torch.randn(8, 6, 16)
        >>> log_alpha, log_beta = -torch.rand(2, 8, 6)
        >>> ppma.decomposed_attention(s1, s2, v, log_alpha, log_beta).shape
        torch.Size([8, 6, 16])
    """
    return _linear(("s1", "s2", "v"), (s1, s2, v), log_alpha, log_beta, paths, backend)


def _linear(
    names: tuple[str, str, str],
    qkv: tuple[Tensor, Tensor, Tensor],
    log_alpha: Tensor,
    log_beta: Tensor,
    paths: Paths,
    backend: BackendName,
) -> Tensor:
    tensors, batch = _attention_inputs(names, qkv, log_alpha, log_beta, paths, backend)
    if backend == "reference":
        return _restore(reference.linear_attention(*tensors, paths=paths), batch)
    return _restore(torch_ops.run("linear_attention", tensors, paths, backend), batch)


def _attention_inputs(
    names: tuple[str, str, str],
    qkv: tuple[Tensor, Tensor, Tensor],
    log_alpha: Tensor,
    log_beta: Tensor,
    paths: Paths,
    backend: BackendName,
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Check, cast for autocast, broadcast and bring to canonical shape; also the batch axes to restore."""
    checks.one_of("paths", paths, ND_PATHS)
    checks.one_of("backend", backend, backends.NAMES)
    if checks.canonical(*qkv, log_alpha, log_beta):
        return [*_autocast(*qkv), log_alpha, log_beta], tuple(log_alpha.shape[:2])
    log_alpha, log_beta = checks.log_decays({"log_alpha": log_alpha, "log_beta": log_beta}, axes=2)
    grid = log_alpha.shape[-2:]
    for name, tensor in zip(names, qkv, strict=True):
        checks.values(name, tensor, grid, like=None if tensor is qkv[0] else (names[0], qkv[0]))
    checks.same_device(names[0], qkv[0], "log_alpha", log_alpha)
    checks.same_channels(names[1], qkv[1], names[0], qkv[0])
    batch = checks.broadcast_batch(
        {
            **{name: tensor.shape[:-3] for name, tensor in zip(names, qkv, strict=True)},
            "the log-decays": log_alpha.shape[:-2],
        }
    )
    values = [_canonical(tensor, batch, 3) for tensor in _autocast(*qkv)]
    return [*values, *(_canonical(decay, batch, 2) for decay in (log_alpha, log_beta))], batch

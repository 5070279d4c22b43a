"""The operators as PyTorch sees them: `torch.ops.ppma.*` with fake kernels, gradients and vmap rules.

Each calls the backend that `backends.call` picks when it runs, so a compiled or exported graph carries the
backend's name and not its code. Shapes are the canonical ones of `ppma.ops.layout`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppma.ops.backends import call
from ppma.ops.layout import compute_dtype, heads_last_empty, split_paths


def _run(backend: str, operator: str, values: Tensor, *args: Any) -> Any:
    """Call the backend's function. Autocast ends here: what is computed in float32 inside must stay float32."""
    with torch.autocast(values.device.type, enabled=False):
        return call(backend, operator, values, *args)


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@torch.library.custom_op("ppma::scan", mutates_args=())
def scan(x: Tensor, log_decays: list[Tensor], paths: str, backend: str) -> Tensor:
    return _run(backend, "scan", x, x, log_decays, paths)


@torch.library.custom_op("ppma::scan_backward", mutates_args=())
def scan_backward(grad: Tensor, x: Tensor, log_decays: list[Tensor], paths: str, backend: str) -> list[Tensor]:
    return _run(backend, "scan_backward", x, grad, x, log_decays, paths)


@torch.library.custom_op("ppma::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    combine: str,
    paths: str,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the backend's function of this name gets and gives, as every operator here without `backend`.

    Args:
        q: (B, heads, H, W, d).
        k: (B, heads, H, W, d).
        v: (B, heads, H, W, dv).
        log_alpha: (B, heads, H, W).
        log_beta: (B, heads, H, W).
        combine: "hadamard" or "logit".
        paths: "v2h", "h2v" or "2d".
        scale: factor on the scores.
        backend: see `backends.call`.

    Returns:
        The output (B, heads, H, W, dv); for each softmax s the largest logit of every row at [2 s] and the sum of
        exp(logit - largest) at [2 s + 1], (2 * softmaxes, B, heads, H, W); and, where there are two softmaxes, the
        output of the first, (1, B, heads, H, W, dv), else an empty (0, ...) tensor.
    """
    return _run(backend, "attention", q, q, k, v, log_alpha, log_beta, combine, paths, scale)


@torch.library.custom_op("ppma::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    out: Tensor,
    stats: Tensor,
    first: Tensor,
    combine: str,
    paths: str,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _run(
        backend, "attention_backward", q, grad, q, k, v, log_alpha, log_beta, out, stats, first, combine, paths, scale
    )


@torch.library.custom_op("ppma::criss_cross", mutates_args=())
def criss_cross(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    combine: str,
    paths: str,
    scale: float,
    backend: str,
) -> Tensor:
    return _run(backend, "criss_cross", q, q, k, v, log_alpha, log_beta, combine, paths, scale)


@torch.library.custom_op("ppma::criss_cross_backward", mutates_args=())
def criss_cross_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    combine: str,
    paths: str,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _run(backend, "criss_cross_backward", q, grad, q, k, v, log_alpha, log_beta, combine, paths, scale)


@torch.library.custom_op("ppma::linear", mutates_args=())
def linear(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: str, backend: str) -> Tensor:
    return _run(backend, "linear", q, q, k, v, log_alpha, log_beta, paths)


@torch.library.custom_op("ppma::linear_backward", mutates_args=())
def linear_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    paths: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _run(backend, "linear_backward", q, grad, q, k, v, log_alpha, log_beta, paths)


@scan.register_fake
def _(x, log_decays, paths, backend):  # type: ignore[no-untyped-def]
    return _contiguous_like(x)


@scan_backward.register_fake
def _(grad, x, log_decays, paths, backend):  # type: ignore[no-untyped-def]
    return [_contiguous_like(tensor) for tensor in (x, *log_decays)]


@attention.register_fake
def _(q, k, v, log_alpha, log_beta, combine, paths, scale, backend):  # type: ignore[no-untyped-def]
    softmaxes = len(split_paths(paths)) if combine == "logit" else 1
    dtype = compute_dtype(q.dtype)
    return (
        heads_last_empty(v, v.shape[-1]),
        torch.empty((2 * softmaxes, *q.shape[:-1]), dtype=dtype, device=q.device),
        torch.empty((softmaxes - 1, *v.shape), dtype=dtype, device=q.device),
    )


def _fake_gradients(grad, q, k, v, log_alpha, log_beta, *_):  # type: ignore[no-untyped-def]
    return (
        *(heads_last_empty(tensor, tensor.shape[-1]) for tensor in (q, k, v)),
        _contiguous_like(log_alpha),
        _contiguous_like(log_beta),
    )


@criss_cross.register_fake
def _(q, k, v, log_alpha, log_beta, combine, paths, scale, backend):  # type: ignore[no-untyped-def]
    return heads_last_empty(v, v.shape[-1])


@linear.register_fake
def _(q, k, v, log_alpha, log_beta, paths, backend):  # type: ignore[no-untyped-def]
    return heads_last_empty(v, v.shape[-1])


for _op in (attention_backward, criss_cross_backward, linear_backward):
    _op.register_fake(_fake_gradients)


def _scan_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, log_decays, ctx.paths, ctx.backend = inputs
    ctx.save_for_backward(x, *log_decays)


def _scan_gradient(ctx: Any, grad: Tensor) -> Any:
    x, *log_decays = ctx.saved_tensors
    grad_x, *grad_decays = scan_backward(grad, x, log_decays, ctx.paths, ctx.backend)
    return grad_x, grad_decays, None, None


def _attention_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, combine, paths, scale, backend = inputs
    ctx.options = (combine, paths, scale, backend)
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> Any:
    if grad is None:
        return (None,) * 9
    return (*attention_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _criss_cross_gradient(ctx: Any, grad: Tensor) -> Any:
    return (*criss_cross_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None)


def _linear_gradient(ctx: Any, grad: Tensor) -> Any:
    return (*linear_backward(grad, *ctx.saved_tensors, *ctx.options), None, None)


scan.register_autograd(_scan_gradient, setup_context=_scan_setup)
attention.register_autograd(_attention_gradient, setup_context=_attention_setup)
criss_cross.register_autograd(_criss_cross_gradient, setup_context=_setup)
linear.register_autograd(_linear_gradient, setup_context=_setup)


def _vmap_rule(op: Callable[..., Any], batch_axes: tuple[int, ...] | None = None) -> Callable[..., Any]:
    """Fold the mapped axis into the batch axis of every tensor, run the operator, unfold it again.

    Args:
        op: the operator.
        batch_axes: where each output has its batch axis; None where all have it first.
    """

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size

        def fold(value: Any, dim: Any, axis: int) -> Any:
            if isinstance(value, list):
                return [fold(v, d, axis) for v, d in zip(value, dim, strict=True)]
            if not isinstance(value, Tensor):
                return value
            value = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
            return value.movedim(0, axis).flatten(axis, axis + 1)

        # stats and first, the only inputs whose batch axis is the second, are the 8th and 9th of attention_backward.
        axes = [1 if op is attention_backward and position in (7, 8) else 0 for position in range(len(args))]
        folded = [fold(*item) for item in zip(args, in_dims, axes, strict=True)]
        outputs = op(*folded)
        single = isinstance(outputs, Tensor)
        listed = [outputs] if single else list(outputs)
        places = batch_axes or (0,) * len(listed)
        listed = [out.unflatten(axis, (size, -1)) for out, axis in zip(listed, places, strict=True)]
        if single:
            return listed[0], places[0]
        kind = type(outputs)
        return kind(listed), kind(places)

    return rule


for _op in (
    scan,
    scan_backward,
    attention_backward,
    criss_cross,
    criss_cross_backward,
    linear,
    linear_backward,
):
    _op.register_vmap(_vmap_rule(_op))
attention.register_vmap(_vmap_rule(attention, batch_axes=(0, 1, 1)))

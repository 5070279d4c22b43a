"""Inputs for the kernels, and their comparison with the float64 reference."""

import functools
import os

import torch

from ppma.testing import (
    assert_accurate,
    assert_no_worse,
    exact_logits,
    outputs_and_gradients,
    random_log_decay,
    saturated_logits,
)

# The interpreter takes CPU tensors; on a GPU the same checks go through the real compiler and launcher.
DEVICE = os.environ.get("PPMA_TEST_DEVICE", "cpu")

PATHS = ["v2h", "h2v", "2d"]
HALF = [torch.float16, torch.bfloat16]

# The budget of one rounding of every input, times this. Products sum in float32; on the way to a gradient a value is
# rounded to the type of the inputs a handful of times.
ROUNDINGS = 8


def attention_inputs(grid, dtype=torch.float32, heads=1, d=8, dv=8, batch=1, scale=1.0, seed=0):
    """q, k, v as views of one packed projection, and decays with exact zeros and ones among them."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(batch, *grid, heads, 2 * d + dv, generator=generator).to(dtype)
    q, k, v = packed.movedim(-2, 1).split([d, d, dv], -1)
    decays = [random_log_decay(batch, heads, *grid, generator=generator) for _ in range(2)]
    return [tensor.to(DEVICE) for tensor in ((q * scale).to(dtype), k, v, *decays)]


def spoil_outside(log_alpha, log_beta):
    """NaN and infinity on the edges outside the grid."""
    height, width = log_alpha.shape[-2:]
    rows = torch.arange(height, device=DEVICE)[:, None] > 0
    columns = torch.arange(width, device=DEVICE) > 0
    return torch.where(columns, log_alpha, torch.nan), torch.where(rows, log_beta, torch.inf)


def both_ways(function, inputs, options):
    """The kernels, which get spoiled edges outside the grid, and the exact function.

    The literal reference takes minutes on larger grids; there the PyTorch backend in float64 stands in, which other
    tests hold to the reference within 1e-11.
    """
    log_alpha, log_beta = inputs[-2:]
    log_alpha[..., 0] = 0.0
    log_beta[..., 0, :] = 0.0
    oracle = "reference" if log_alpha[0, 0].numel() <= 25 else "torch"

    def kernels(*tensors):
        return function(*tensors[:-2], *spoil_outside(*tensors[-2:]), backend="triton", **options)

    return kernels, functools.partial(function, backend=oracle, **options)


def assert_kernels_accurate(function, inputs, roundings=ROUNDINGS, **options):
    """Output and gradients agree with the exact ones within the derived budget."""
    assert_accurate(*both_ways(function, inputs, options), inputs, roundings)


def assert_large_logits_accurate(function, magnitude, combine, **options):
    """Within a factor of 4 of PyTorch, where logits are exact and where one key outweighs all others."""
    triton, other = (
        functools.partial(function, combine=combine, scale=1.0, backend=backend, **options)
        for backend in ("triton", "torch")
    )
    for kind in (exact_logits, saturated_logits):
        inputs = [tensor.to(DEVICE) for tensor in kind(magnitude, (4, 5), batch=(1, 2))]
        assert_no_worse(triton, other, other, inputs, rounded=[2] if kind is exact_logits else None)


def assert_empty_batches_work(function, **options):
    for batch in ((0, 2), (2, 0)):
        shapes = [(*batch, 2, 3, 4)] * 3 + [(*batch, 2, 3)] * 2
        tensors = [torch.zeros(shape, device=DEVICE) for shape in shapes]
        out, *grads = outputs_and_gradients(functools.partial(function, backend="triton", **options), tensors)
        assert out.shape == shapes[2]
        assert [grad.shape for grad in grads] == shapes


def assert_saturated_accurate(function, inputs, **options):
    """The same with large scores, where a budget from moved inputs is too small: the exact gradient is nearly 0.

    A score s is known to `eps |s|`, so a weight is known to that, relatively. The gradient of a score is
    `P (dP - D)`, whose terms have the size of `G = |dO| |v|` however small their difference is. Summed over the tokens
    that meet in a result, with weights of at most 2 (two paths), these are the bounds; a chain of two maps squares the
    number of tokens.
    """
    kernels, exact = both_ways(function, inputs, options)
    q, k, v, log_alpha, _ = inputs
    tokens = log_alpha[0, 0].numel()
    scale = q.shape[-1] ** -0.5
    largest_q, largest_k, largest_v = (tensor.abs().max().item() for tensor in (q, k, v))
    score = (q.flatten(2, 3) @ k.flatten(2, 3).mT).abs().max().item() * scale
    assert score > 100
    unit = ROUNDINGS * 2 * torch.finfo(q.dtype).eps * (1 + score)
    out, *grads = outputs_and_gradients(kernels, inputs)
    exact_out, *exact_grads = outputs_and_gradients(exact, [tensor.double() for tensor in inputs])
    cotangent = (
        torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs().max().item()
    )
    grad_score = v.shape[-1] * cotangent * largest_v * tokens
    bounds = [
        largest_v,
        grad_score * largest_k * scale,
        grad_score * largest_q * scale * tokens,
        cotangent * tokens,
        grad_score * tokens,
        grad_score * tokens,
    ]
    results = zip((out, *grads), (exact_out, *exact_grads), bounds, strict=True)
    for position, (actual, expected, bound) in enumerate(results):
        assert torch.isfinite(actual).all(), position
        assert (actual.double() - expected).abs().max().item() <= unit * bound, position

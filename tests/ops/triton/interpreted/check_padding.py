"""Key padding: invalid keys take no part, whatever they hold, and rows without a valid key give 0."""

import functools

import pytest
import torch
from triton_cases import ROUNDINGS, attention_inputs

import ppma
from ppma.ops.backends.triton import potentials
from ppma.testing import assert_accurate

FUNCTIONS = [ppma.polyline_attention, ppma.criss_cross_attention]


def padded_inputs(grid, batch, **options):
    """Inputs, and `valid` without a row, a column, some tokens and the whole of the last of several images."""
    inputs = attention_inputs(grid, batch=batch, **options)
    for decay, first in zip(inputs[3:], ((..., 0), (..., 0, slice(None))), strict=True):
        decay[first] = 0.0
    valid = torch.rand(batch, *grid, generator=torch.Generator().manual_seed(1)) < 0.7
    valid[:, -1], valid[:, :, 0] = False, False
    if batch > 1:
        valid[-1] = False
    return inputs, valid.to(inputs[0].device)


def assert_padding_accurate(function, inputs, valid, **options):
    triton, exact = (
        functools.partial(function, valid=valid, backend=backend, **options) for backend in ("triton", "reference")
    )
    assert_accurate(triton, exact, inputs, ROUNDINGS)


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_padding(function, combine):
    assert_padding_accurate(function, *padded_inputs((4, 5), 2), combine=combine)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("paths", ["v2h", "h2v", "2d"])
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_padding_every_combination(function, combine, paths, dtype):
    inputs, valid = padded_inputs((4, 5), 1, dtype=dtype, heads=2)
    assert_padding_accurate(function, inputs, valid, combine=combine, paths=paths)


@pytest.mark.parametrize(
    ("function", "longest_table"),
    [(ppma.polyline_attention, 64), (ppma.polyline_attention, 0), (ppma.criss_cross_attention, 64)],
)
@pytest.mark.parametrize("paths", ["v2h", "h2v"])
def test_padding_behind_cut(function, paths, longest_table, monkeypatch):
    """The first token takes no part, and all valid keys lie behind a decay of 0."""
    monkeypatch.setattr(potentials, "LONGEST_TABLE", longest_table)
    inputs, valid = padded_inputs((3, 3), 1)
    valid[:] = True
    valid[:, 0, 0] = False
    for decay in inputs[3:]:
        decay[:] = -torch.inf
    assert_padding_accurate(function, inputs, valid, combine="logit", paths=paths)
    assert not function(*inputs, combine="logit", paths=paths, valid=valid, backend="triton")[:, :, 0, 0].any()


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_padding_nan_ignored(function, combine):
    inputs, valid = padded_inputs((2, 3), 2)
    outside = ~valid[:, None, :, :, None]
    spoiled = [inputs[0], *(tensor.masked_fill(outside, torch.nan) for tensor in inputs[1:3]), *inputs[3:]]
    leaves = [tensor.detach().requires_grad_() for tensor in spoiled]
    out = function(*leaves, combine=combine, valid=valid, backend="triton")
    torch.testing.assert_close(out, function(*inputs, combine=combine, valid=valid, backend="torch"))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))

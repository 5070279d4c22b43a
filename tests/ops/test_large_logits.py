"""Gradients of the softmax attentions where logits are large: as exact as those of plain PyTorch."""

import functools

import pytest
import torch

import ppma
from ppma import testing
from ppma.ops.backends.native import library
from ppma.testing import exact_logits, outputs_and_gradients, saturated_logits

MAGNITUDES = [1.0, 10.0, 1e3, 1e4, 1e6, 1e8]
PATHS = ["v2h", "h2v", "2d"]
COMBINES = ["hadamard", "logit"]
FUNCTIONS = [ppma.polyline_attention, ppma.criss_cross_attention]
KINDS = [exact_logits, saturated_logits]


def assert_no_worse(actual, yardstick, exact, kind, *arguments, **options):
    inputs = kind(*arguments, **options)
    testing.assert_no_worse(actual, yardstick, exact, inputs, rounded=[2] if kind is exact_logits else None)


@pytest.fixture(params=library.available() or ["none"])
def isa(request, monkeypatch):
    monkeypatch.setattr(library, "forced_isa", request.param)


def call(function, combine, paths, backend):
    return functools.partial(function, combine=combine, paths=paths, scale=1.0, backend=backend)


@pytest.mark.native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_native_against_torch(kind, function, combine, paths):
    native, torch_backend = (call(function, combine, paths, backend) for backend in ("native", "torch"))
    for magnitude in MAGNITUDES:
        assert_no_worse(native, torch_backend, torch_backend, kind, magnitude, (4, 5))


@pytest.mark.native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("grid", [(15, 17), (2, 203)], ids=str)
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("kind", KINDS)
def test_native_against_torch_several_tiles(kind, combine, grid):
    native, torch_backend = (call(ppma.polyline_attention, combine, "2d", backend) for backend in ("native", "torch"))
    for magnitude in (1e4, 1e8):
        assert_no_worse(native, torch_backend, torch_backend, kind, magnitude, grid, batch=(1, 1))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("kind", KINDS)
def test_torch_against_autograd(kind, combine, magnitude):
    """The backward pass of `softmax` itself is the yardstick."""

    def dense(q, k, v, log_alpha, log_beta):
        scores = q.flatten(-3, -2) @ k.flatten(-3, -2).mT
        values = v.flatten(-3, -2)
        if combine == "hadamard":
            out = (scores.softmax(-1) * ppma.polyline_mask(log_alpha, log_beta)) @ values
        else:
            masks = [ppma.polyline_mask(log_alpha, log_beta, paths=path, log=True) for path in ("v2h", "h2v")]
            out = sum((scores + mask).softmax(-1) @ values for mask in masks) / 2
        return out.view(v.shape)

    backend = call(ppma.polyline_attention, combine, "2d", "torch")
    reference = call(ppma.polyline_attention, combine, "2d", "reference")
    assert_no_worse(backend, dense, reference, kind, magnitude, (4, 5))


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=pytest.mark.native)])
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_equal_logits(function, combine, backend):
    """However large they are: a log-sum-exp in float32 would round the number of keys away."""
    q = k = torch.full((1, 1, 3, 4, 1), 1e4)
    v = torch.randn(1, 1, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    decay = torch.zeros(1, 1, 3, 4)
    call_ = functools.partial(function, combine=combine, paths="v2h", scale=1.0, backend=backend)
    out, _, _, grad_v, _, _ = outputs_and_gradients(call_, [q, k, v, decay, decay])
    mean = v.mean((2, 3), keepdim=True)
    torch.testing.assert_close(out, mean.expand_as(v))
    cotangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(grad_v, cotangent.mean((2, 3), keepdim=True).expand_as(v).float())


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=pytest.mark.native)])
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradient_weight_1(function, combine, backend):
    """One key beyond doubt: q and k receive exactly nothing, whatever rounding left of the differences."""
    inputs = saturated_logits(1e8, (5, 6))
    _, grad_q, grad_k, *_ = outputs_and_gradients(call(function, combine, "2d", backend), inputs)
    assert not grad_q.any()
    assert not grad_k.any()

"""The native decay head against its formula in float64, on every instruction set that this CPU has."""

import functools

import pytest
import torch

from ppma.layers import PolylineAttention
from ppma.ops import backends
from ppma.ops.backends import native
from ppma.ops.decay_formula import decay_head as formula
from ppma.ops.decay_head import decay_head, tapped_decay_head
from ppma.testing import assert_accurate, outputs_and_gradients

pytestmark = pytest.mark.native

# Batch, tokens, heads, channels of a head: no image, one token, no whole vector, several tasks of tokens, the paper's.
SHAPES = [(0, 4, 2, 8), (1, 1, 1, 1), (3, 70, 3, 6), (2, 33, 1, 50), (2, 130, 4, 16), (1, 64, 2, 32)]


def inputs(shape, outputs=2, with_rate=True):
    batch, tokens, heads, d = shape
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(batch, tokens, heads * d), (outputs, d), (heads, outputs), *([(heads, outputs)] if with_rate else [])]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def joined(head, softplus, x, weight, bias, rate=None, **options):
    """All results of a head in one tensor, the tokens with a weight that tells their gradient from the others'."""
    tokens, *log_decays = head(x, weight, bias, rate, softplus, **options)
    return torch.cat([3 * tokens.flatten(), *(part.flatten() for part in log_decays)])


def native_head(x, weight, bias, rate, softplus):
    tokens, log_decays = tapped_decay_head(x, weight, bias, rate, softplus=softplus, backend="native")
    return tokens, *log_decays


def roundings(shape):
    """A parameter's gradient sums all tokens and heads; a logit its channels; softplus some 20 operations."""
    return shape[0] * shape[1] * shape[2] + shape[3] + 32


@pytest.mark.parametrize("softplus", [False, True], ids=["relu", "softplus"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("with_rate", [False, True], ids=["no rate", "rate"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_accuracy(isa, shape, with_rate, outputs, softplus):
    assert backends.kernels_serve("auto", "decay_head", torch.zeros(1))
    fast, exact = (functools.partial(joined, head, softplus) for head in (native_head, formula))
    assert_accurate(fast, exact, inputs(shape, outputs, with_rate), roundings(shape))


def test_empty_batch(isa):
    results = outputs_and_gradients(functools.partial(joined, native_head, True), inputs(SHAPES[0]))
    assert results[0].numel() == results[1].numel() == 0
    assert all((gradient == 0).all() for gradient in results[2:])


@pytest.mark.parametrize("softplus", [False, True], ids=["relu", "softplus"])
def test_far_logits(isa, softplus):
    """No overflow, the tail keeps its digits, and a NaN is no decay."""
    bias = torch.tensor([[-80.0, -20.0], [20.0, 1e8], [0.0, float("nan")]])
    results = decay_head(torch.zeros(1, 5, 6), torch.ones(2, 2), bias, softplus=softplus, backend="native")
    expected = formula(torch.zeros(1, 5, 6, dtype=torch.float64), torch.ones(2, 2), bias.double(), None, softplus)[1:]
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=5e-7, atol=0.0, equal_nan=True)


def test_unread_outputs(isa):
    """Gradients of one output, of the tokens alone, and of nothing but the log-decays."""
    tensors = inputs((2, 20, 3, 8))
    for pick in (slice(1, 2), slice(0, 1), slice(1, 3)):
        found = []
        for head, dtype in ((native_head, torch.float32), (formula, torch.float64)):
            leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
            total = sum(part.square().sum() for part in head(*leaves, True)[pick])
            found.append(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
        for result, exact in zip(*found, strict=True):
            torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-4)


def test_strided_tokens(isa):
    x, *parameters = inputs((2, 21, 4, 8))
    expected = outputs_and_gradients(functools.partial(joined, native_head, True), (x, *parameters))
    for strided in (torch.cat((x, x), -1)[..., :32], x.mT.contiguous().mT):
        x.copy_(strided)
        out = joined(native_head, True, strided.requires_grad_(), *parameters)
        assert torch.equal(out, expected[0])
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert torch.equal(torch.autograd.grad(out, strided, cotangent.float())[0], expected[1])


def test_bits_any_threads(isa):
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(outputs_and_gradients(functools.partial(joined, native_head, True), inputs((3, 200, 4, 16))))
    torch.set_num_threads(before)
    for more in results[1:]:
        assert all(map(torch.equal, results[0], more))


def test_second_derivatives():
    """Of the kernel's gradient in float32 as of the formula's in float64."""
    tensors = inputs((2, 9, 2, 4))
    found = []
    for head, dtype in ((native_head, torch.float32), (formula, torch.float64)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        first = torch.autograd.grad(joined(head, True, *leaves).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), leaves))
    for result, exact in zip(*found, strict=True):
        assert ((result.double() - exact).abs() <= 1e-4 * exact.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_half_precision_keeps_float32_decays(dtype, backend):
    x, *parameters = inputs((2, 10, 2, 8))
    log_decays = decay_head(x.to(dtype), *parameters, softplus=True, backend=backend)
    exact = formula(x.to(dtype).double(), *(p.double() for p in parameters), True)[1:]
    for result, reference in zip(log_decays, exact, strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), reference, rtol=1e-5, atol=1e-5)


def test_parameters_of_another_dtype():
    x, *parameters = inputs((2, 10, 2, 8))
    wide = [parameter.double().requires_grad_() for parameter in parameters]
    total = sum(part.sum() for part in decay_head(x, *wide, softplus=True, backend="native"))
    assert [grad.dtype for grad in torch.autograd.grad(total, wide)] == [torch.float64] * 3


def test_watched_by_a_mode():
    """The products of the formula are counted, as they are where no kernel runs."""
    from torch.utils.flop_counter import FlopCounterMode

    x, *parameters = inputs((2, 10, 2, 8))
    with FlopCounterMode(display=False) as counter:
        decay_head(x, *parameters, softplus=True)
    assert counter.get_total_flops() == 2 * 2 * 10 * 2 * 8 * 2


def test_layer_runs_the_kernel(monkeypatch):
    calls = []
    kernel = native.decay_head
    monkeypatch.setattr(native, "decay_head", lambda *arguments: calls.append(1) or kernel(*arguments))
    layer, x = PolylineAttention(32, heads=4, formulation="release"), torch.randn(2, 5, 6, 32)
    assert outputs_and_gradients(layer, [x])[1].isfinite().all()
    assert calls == [1]

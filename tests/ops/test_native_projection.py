"""q, k, v and log-decays of one layer against their formula in float64, on every instruction set that this CPU has."""

import functools

import pytest
import torch

from ppma.ops.backends import kernels_serve, native
from ppma.ops.backends.native.trained_linear import FEWEST_ROWS
from ppma.ops.projection import project
from ppma.ops.projection_formula import project as formula
from ppma.testing import assert_accurate, outputs_and_gradients

pytestmark = pytest.mark.native

# Images, tokens, heads, channels of a head: images that end within a block of rows, heads of less than a vector and of
# several, one head, heads that cannot be rotated in whole vectors, too few rows for packed products.
SHAPES = [(5, 213, 4, 16), (2, 520, 2, 4), (3, 350, 3, 32), (1, FEWEST_ROWS, 1, 16), (4, 300, 3, 10), (2, 9, 2, 8)]
PACKED = SHAPES[:4]


def angles(tokens, d):
    return torch.linspace(0.0, 3.0, tokens * d // 2, dtype=torch.float64).view(tokens, d // 2)


def inputs(shape, outputs=2, with_rate=True):
    """x, weight, bias, and weight, bias and rate of the decays where there are any."""
    images, tokens, heads, d = shape
    dim, generator = heads * d, torch.Generator().manual_seed(tokens)
    shapes = [(images, tokens, dim), (3 * dim, dim), (3 * dim,)]
    if outputs:
        shapes += [(outputs, d), (heads, outputs), *([(heads, outputs)] if with_rate else [])]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def results(function, shape, softplus, x, weight, bias, decay_weight=None, decay_bias=None, rate=None):
    """All results, v again with a weight that tells its gradient from that of v."""
    cos, sin = (table.to(x.dtype) for table in (angles(shape[1], shape[3]).cos(), angles(shape[1], shape[3]).sin()))
    q, k, v, values, *log_decays = function(
        x, weight, bias, shape[2], cos, sin, decay_weight, decay_bias, rate, softplus
    )
    return [q, k, v, 3 * values, *log_decays]


def joined(function, shape, softplus, *tensors):
    return torch.cat([part.flatten() for part in results(function, shape, softplus, *tensors)])


def roundings(shape):
    """A channel sums its inputs, their gradients the outputs, those of parameters all tokens, of decays also all heads;
    softplus takes some 20 operations.
    """
    images, tokens, heads, d = shape
    return images * tokens * heads + 4 * heads * d + 32


@pytest.mark.parametrize("softplus", [False, True], ids=["relu", "softplus"])
@pytest.mark.parametrize("decays", [(0, False), (1, False), (2, False), (2, True)], ids=["none", "one", "two", "rates"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(isa, shape, decays, softplus):
    assert kernels_serve("auto", "project", torch.zeros(1))
    fast, exact = (functools.partial(joined, function, shape, softplus) for function in (native.project, formula))
    assert_accurate(fast, exact, inputs(shape, *decays), roundings(shape))


def test_empty_batch(isa):
    shape = (0, 12, 2, 8)
    out, *gradients = outputs_and_gradients(functools.partial(joined, native.project, shape, True), inputs(shape))
    assert out.numel() == 0
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("read", [0, 1, 2, 3, 4, 5], ids=["q", "k", "v", "values", "alpha", "beta"])
def test_unread_outputs(isa, read):
    """The gradient of one result is that of the formula: nothing is left over from the others."""
    shape = PACKED[0]
    leaves = {}
    for function, dtype in ((native.project, torch.float32), (formula, torch.float64)):
        leaves[function] = [tensor.to(dtype).requires_grad_() for tensor in inputs(shape)]
        results(function, shape, True, *leaves[function])[read].square().mean().backward()
    for ours, theirs in zip(*leaves.values(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any()
        else:
            tolerance = 2.0**-24 * roundings(shape) * theirs.grad.abs().max()
            assert (ours.grad - theirs.grad).abs().max() <= tolerance


@pytest.mark.parametrize("trained", range(6), ids=["x", "weight", "bias", "decay weight", "decay bias", "rate"])
def test_frozen_tensors(trained):
    """The gradient of one input, which is the same as if all were wanted; the others get none."""
    shape = PACKED[0]
    every = [tensor.requires_grad_() for tensor in inputs(shape)]
    joined(native.project, shape, True, *every).square().sum().backward()
    tensors = inputs(shape)
    tensors[trained].requires_grad_()
    joined(native.project, shape, True, *tensors).square().sum().backward()
    assert torch.equal(tensors[trained].grad, every[trained].grad)
    assert all(tensor.grad is None for at, tensor in enumerate(tensors) if at != trained)


def test_log_decays_of_0_and_far_logits(isa):
    """Log-decays are exactly 0 behind a ReLU; logits of 1e8 neither overflow nor harm another head."""
    shape = PACKED[0]
    x, weight, bias, decay_weight, decay_bias, _ = inputs(shape)
    decay_bias = torch.tensor([[-1e8, 1e8]]).expand_as(decay_bias)
    for softplus in (False, True):
        *_, log_alpha, log_beta = results(native.project, shape, softplus, x, weight, bias, decay_weight, decay_bias)
        assert (log_alpha == 0).all()
        torch.testing.assert_close(log_beta, torch.full_like(log_beta, -1e8))


def test_strided_tokens(isa):
    shape = PACKED[0]
    x, *others = inputs(shape)
    run = functools.partial(joined, native.project, shape, True)
    expected = outputs_and_gradients(run, [x, *others])
    out = run(x.mT.contiguous().mT, others[0].mT.contiguous().mT, *others[1:])
    assert torch.equal(out, expected[0])


def test_bits_any_threads(isa):
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        run = functools.partial(joined, native.project, PACKED[0], True)
        found.append(outputs_and_gradients(run, inputs(PACKED[0])))
    torch.set_num_threads(before)
    for more in found[1:]:
        assert all(map(torch.equal, found[0], more))


@pytest.mark.parametrize("expanded", [False, True])
def test_second_derivatives(expanded):
    """Bias and rate of the decays may be views of one number for each head."""
    shape, leaves = (1, FEWEST_ROWS, 1, 16), {}
    for function, dtype in ((native.project, torch.float32), (formula, torch.float64)):
        tensors = leaves[dtype] = [tensor.to(dtype).requires_grad_() for tensor in inputs(shape)]
        *others, bias, rate = tensors
        terms = [term[:, :1].expand(-1, 2) if expanded else term for term in (bias, rate)]
        out = joined(function, shape, True, *others, *terms)
        slopes = torch.autograd.grad(out.square().mean(), tensors, create_graph=True)
        sum(slope.square().mean() for slope in slopes).backward()
    # Products follow one another: output, slopes, and the gradients of both.
    tolerance = 4 * 2.0**-24 * roundings(shape)
    for ours, theirs in zip(*leaves.values(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= tolerance * theirs.grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_float32_decays(dtype):
    shape = PACKED[0]
    x, weight, bias, *decay = inputs(shape)
    tables = angles(shape[1], shape[3]).cos().float(), angles(shape[1], shape[3]).sin().float()
    projected = project(x.to(dtype), weight.to(dtype), bias.to(dtype), shape[2], tables, (*decay, True))
    assert projected.q.dtype == dtype
    assert all(log_decay.dtype == torch.float32 for log_decay in projected.log_decays)

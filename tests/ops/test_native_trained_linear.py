"""The linear layer of training against its formula in float64, on every instruction set that this CPU has."""

import functools

import pytest
import torch
import torch.nn.functional as F

from ppma.ops import trained_linear as module
from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.native.trained_linear import FEWEST_ROWS
from ppma.ops.trained_linear import trained_linear
from ppma.testing import assert_accurate, outputs_and_gradients

pytestmark = pytest.mark.native

# Images and tokens: packed products, and too few rows for them. Channels without a whole vector.
SHAPES = [(4, FEWEST_ROWS // 4 + 3, 33, 21), (3, 7, 20, 5), (1, FEWEST_ROWS, 1, 1)]
FACTORS = {"none": None, "all": [1.25] * 4, "some": [1.25, 0.0, 0.0, 1.25], "no image": [0.0] * 4}

native = functools.partial(trained_linear, backend="native")


def formula(x, weight, bias=None, residual=None, factors=None):
    out = F.linear(x, weight, bias)
    if factors is not None:
        out = factors.to(out)[:, None, None] * out
    return out if residual is None else residual + out


def make(images, tokens, inputs, outputs):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((images, tokens, inputs), (outputs, inputs), (outputs,), (images, tokens, outputs))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def given(factors, images):
    return None if factors is None else torch.tensor(factors[:images])


def roundings(images, tokens, inputs, outputs):
    """An output sums its inputs, the gradient of an input the outputs, that of a weight all tokens; then a few more."""
    return images * tokens + inputs + outputs + 8


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(isa, shape, factors):
    drawn = given(factors, shape[0])
    fast, exact = (functools.partial(function, factors=drawn) for function in (native, formula))
    assert_accurate(fast, exact, make(*shape), roundings(*shape))


@pytest.mark.parametrize("factors", [None, [0.0, 2.0, 2.0, 0.0]])
def test_without_bias_and_residual(factors):
    shape = SHAPES[0]
    fast, exact = (functools.partial(function, bias=None, factors=given(factors, 4)) for function in (native, formula))
    assert_accurate(fast, exact, make(*shape)[:2], roundings(*shape))


def test_images_that_count_0_are_not_read():
    x, weight, bias, residual = make(*SHAPES[0])
    x[1] = float("nan")
    out = native(x, weight, bias, residual, torch.tensor([2.0, 0.0, 2.0, 2.0]))
    assert torch.equal(out[1], residual[1])
    assert out.isfinite().all()


def test_factors_of_several_values():
    tensors, factors = make(*SHAPES[0]), torch.tensor([1.0, 2.0, 0.0, 1.0])
    with pytest.raises(BackendUnavailableError, match="0 or have one value"):
        native(*tensors, factors)
    exact = functools.partial(formula, factors=factors)
    assert_accurate(functools.partial(trained_linear, factors=factors), exact, tensors, roundings(*SHAPES[0]))


def test_strided_inputs(isa):
    x, weight, bias, residual = make(*SHAPES[0])
    expected = native(x, weight, bias, residual)
    others = [tensor.mT.contiguous().mT for tensor in (x, weight)]
    assert torch.equal(native(*others, bias, residual.mT.contiguous().mT), expected)
    assert torch.equal(
        native(x.unflatten(1, (7, 37)), weight, bias, residual.unflatten(1, (7, 37))).flatten(1, 2), expected
    )


def test_frozen_tensors():
    """Gradients that nobody asks for are not computed."""
    x, weight, bias, residual = make(*SHAPES[0])
    bias.requires_grad_()
    native(x, weight, bias, residual).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, x.shape[0] * x.shape[1]))
    assert x.grad is weight.grad is residual.grad is None


def test_second_derivatives():
    shape = (2, FEWEST_ROWS // 2, 6, 5)

    def penalty(function, x, weight, bias):
        out = function(x, weight, bias, factors=torch.tensor([2.0, 2.0]))
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return slope.square().sum()

    tensors = [tensor.requires_grad_() for tensor in make(*shape)[:3]]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    for function, leaves in ((native, tensors), (formula, exact)):
        penalty(function, *leaves).backward()
    # Four products follow one another: output, slope, and the gradients of both.
    tolerance = 4 * 2.0**-24 * roundings(*shape)
    for ours, theirs in zip(tensors, exact, strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= tolerance * theirs.grad.abs().max()


def test_empty_batch(isa):
    x, weight, bias, residual = make(0, 5, 4, 3)
    out, *gradients = outputs_and_gradients(native, [x, weight, bias, residual])
    assert out.shape == (0, 5, 3)
    assert all((gradient == 0).all() for gradient in gradients)


def test_bits_any_threads():
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(native(*make(*SHAPES[0]), torch.tensor([2.0, 0.0, 2.0, 2.0])))
    torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_pytorchs(dtype, monkeypatch):
    asked = []
    monkeypatch.setattr(module.backends, "compose", lambda backend, *_: asked.append(backend))
    trained_linear(torch.ones(2, 3, 4, dtype=dtype), torch.ones(5, 4, dtype=dtype), None)
    assert asked == ["torch"]

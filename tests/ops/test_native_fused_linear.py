"""The packed linear layers against PyTorch in float64, on every instruction set that this CPU has."""

import pytest
import torch

from ppma.layers.fused import FusedLinear
from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.fused_linear import fused_linear

pytestmark = pytest.mark.native

# Rows, inputs, outputs: no whole tile or vector, several blocks of rows, several parts of the inputs.
SHAPES = [(1, 1, 1), (5, 7, 3), (49, 64, 200), (98, 33, 65), (200, 800, 24), (13, 1000, 17)]


def make(rows, inputs, outputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + inputs)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def bound(x, weight, bias, residual, norm):
    """A dot product of n terms is off by at most n + 2 roundings of the sum of their magnitudes, a norm adds n more."""
    values = torch.nn.functional.layer_norm(x.double(), x.shape[-1:], eps=1e-6) if norm else x.double()
    magnitudes = values.abs() @ weight.double().abs().T + bias.double().abs()
    if residual is not None:
        magnitudes = magnitudes + residual.double().abs()
    return 2.0**-24 * (x.shape[-1] * (2 if norm else 1) + 8) * magnitudes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_accuracy(isa, shape, norm, with_residual):
    x, weight, bias, residual = make(*shape)
    residual = residual if with_residual else None
    options = {"norm_eps": 1e-6 if norm else None}
    result = fused_linear(x, weight, bias, residual, **options, backend="native")
    doubled = [None if tensor is None else tensor.double() for tensor in (x, weight, bias, residual)]
    exact = fused_linear(*doubled, **options, backend="torch")
    assert ((result.double() - exact).abs() <= bound(x, weight, bias, residual, norm)).all()


@pytest.mark.parametrize("head_dim", [2, 4, 16, 32])
def test_accuracy_rotated(isa, head_dim):
    tokens, heads = 6, 4
    rotated = 2 * heads * head_dim
    x, weight, bias, _ = make(4 * tokens, 20, rotated + head_dim + 5)
    angles = torch.arange(tokens)[:, None] / torch.arange(1, head_dim // 2 + 1)
    rotary = angles.cos(), angles.sin()
    result = fused_linear(x, weight, bias, rotary=rotary, rotated=rotated, backend="native")
    exact = fused_linear(
        x.double(),
        weight.double(),
        bias.double(),
        rotary=tuple(table.double() for table in rotary),
        rotated=rotated,
        backend="torch",
    )
    # Each rotated output is a sum of two, with factors of at most 1.
    limit = bound(x, weight, bias, None, False)
    limit[:, :rotated] += limit[:, :rotated].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    assert ((result.double() - exact).abs() <= 1.5 * limit).all()


def test_strided_inputs(isa):
    x, weight, bias, residual = make(9, 16, 8)
    wide, wide_residual = torch.cat((x, x), -1)[:, :16], torch.cat((residual, residual), -1)[:, :8]
    expected = fused_linear(x, weight, bias, residual, backend="native")
    assert torch.equal(fused_linear(wide, weight, bias, wide_residual, backend="native"), expected)
    assert torch.equal(fused_linear(x.T.contiguous().T, weight, bias, residual, backend="native"), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposed_weight_same_bits(isa, shape):
    x, weight, bias, _ = make(*shape)
    transposed = weight.t().contiguous().t()
    results = [fused_linear(x, matrix, bias, backend="native") for matrix in (weight, transposed)]
    assert torch.equal(*results)


def test_any_number_of_threads(isa):
    x, weight, bias, residual = make(300, 100, 70)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(fused_linear(x, weight, bias, residual, norm_eps=1e-6, backend="native"))
        results.append(fused_linear(x[:10], weight, bias, residual[:10], norm_eps=1e-6, backend="native"))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results[::2])
    assert all(torch.equal(results[1], result) for result in results[1::2])


def test_empty(isa):
    x, weight, bias, residual = make(0, 4, 3)
    assert fused_linear(x, weight, bias, residual, norm_eps=1e-6, backend="native").shape == (0, 3)


def test_gradient(isa):
    x, weight, bias, residual = make(4, 6, 5)
    x.requires_grad_()
    with pytest.raises(BackendUnavailableError, match="fused_linear has no gradient"):
        fused_linear(x, weight, bias, residual, backend="native")
    fused_linear(x, weight, bias, residual).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))


def test_packed_weight_follows_weight(isa):
    x, weight, bias, _ = make(4, 6, 5)
    layer, other = FusedLinear(weight, bias), FusedLinear(2 * weight, bias)
    with torch.no_grad():
        first = layer(x)
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(x), other(x))
        assert not torch.equal(layer(x), first)
        assert torch.equal(layer.double().float()(x), other(x))

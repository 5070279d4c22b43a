"""The gradients of 3x3 convolutions against PyTorch in float64, on every instruction set that this CPU has."""

import pytest
import torch

from ppma.layers.convolution import Conv3x3
from ppma.ops import backends
from ppma.ops.backends.native import conv, library
from ppma.ops.conv import conv3x3
from ppma.testing import outputs_and_gradients

pytestmark = pytest.mark.native

# Batch, height, width, inputs, outputs: no image, single pixels and rows, no whole vector, unequal groups, and chunks
# that begin inside an image.
SHAPES = [
    (0, 4, 4, 2, 3),
    (1, 1, 1, 1, 1),
    (2, 1, 9, 3, 5),
    (3, 8, 1, 2, 17),
    (2, 7, 7, 19, 40),
    (5, 13, 29, 3, 33),
    (1, 30, 33, 16, 70),
]


def make(batch, height, width, inputs, outputs, stride=1):
    generator = torch.Generator().manual_seed(height + width)
    out = (batch, -(-height // stride), -(-width // stride), outputs)
    shapes = (out, (batch, height, width, inputs), (outputs, inputs, 3, 3), (outputs,))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def exact(grad, x, weight, stride):
    """Gradients of weight and bias in float64."""
    weight, bias = weight.double().requires_grad_(), torch.zeros(len(weight), dtype=torch.float64, requires_grad=True)
    out = conv3x3(x.double(), weight, bias, stride=stride, backend="torch")
    return torch.autograd.grad(out, (weight, bias), grad.double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_accuracy(isa, shape, stride):
    grad, x, weight, _ = make(*shape, stride)
    results, expected = conv.weight_gradient(grad, x, weight, stride), exact(grad, x, weight, stride)
    # A sum over all pixels is off by at most as many roundings of the sum of the magnitudes, plus those of the chunks.
    terms = grad[..., 0].numel() + 16
    for result, reference, magnitude in zip(results, expected, exact(grad.abs(), x.abs(), weight, stride), strict=True):
        assert result.shape == reference.shape
        assert ((result.double() - reference).abs() <= 2.0**-24 * terms * magnitude).all()


@pytest.mark.parametrize("shape", [(0, 4, 4, 16, 16), (2, 1, 9, 16, 17), (3, 8, 1, 20, 16), (1, 30, 33, 16, 70)])
def test_input_gradient(isa, winograd_magnitudes, shape):
    grad, x, weight, _ = make(*shape)
    x = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(conv3x3(x, weight.double(), None, backend="torch"), x, grad.double())
    turned = weight.flip(2, 3).transpose(0, 1)
    # As in test_native_fused_conv.py.
    limit = 2.0**-24 * (grad.shape[-1] + 16) * winograd_magnitudes(grad, turned, torch.zeros(1))
    result = conv.input_gradient(grad, weight)
    assert result.shape == expected.shape
    assert ((result.double() - expected).abs() <= limit).all()


def test_any_number_of_threads(isa):
    grad, x, weight, _ = make(3, 17, 23, 8, 48)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(torch.cat([part.flatten() for part in conv.weight_gradient(grad, x, weight, 1)]))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


def test_strided_tensors(isa):
    grad, x, weight, _ = make(2, 6, 15, 4, 8)
    wide = torch.cat((x, x), -1)[..., :4]
    channels_first = grad.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    expected = conv.weight_gradient(grad, x, weight, 1)
    assert all(map(torch.equal, conv.weight_gradient(channels_first, wide, weight, 1), expected))
    constant = torch.ones(()).expand(grad.shape)
    results = conv.weight_gradient(constant, x, weight, 1)
    assert all(map(torch.equal, results, conv.weight_gradient(torch.ones_like(grad), x, weight, 1)))


def test_wrong_shapes_are_refused(isa):
    grad, x, weight, _ = make(2, 6, 15, 4, 8)
    with pytest.raises(ValueError, match=r"expected torch\.float32 of shape"):
        conv.weight_gradient(grad[:, :5], x, weight, 1)


@pytest.mark.parametrize(("stride", "inputs", "outputs"), [(1, 5, 9), (2, 5, 9), (1, 16, 17), (2, 32, 33)])
def test_layer(stride, inputs, outputs, monkeypatch):
    """The layer takes the kernel for weight and bias, and gives what PyTorch gives; also without a gradient of x."""
    calls = []
    run = conv.weight_gradient
    monkeypatch.setattr(conv, "weight_gradient", lambda *given: calls.append(1) or run(*given))
    torch.manual_seed(0)
    layer, x = Conv3x3(inputs, outputs, stride), torch.randn(2, 30, 29, inputs, requires_grad=True)
    gradients = {}
    for backend in ("native", "torch"):
        layer.backend = backend
        out = layer(x)
        gradients[backend] = [out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))]
    for fast, plain in zip(gradients["native"], gradients["torch"], strict=True):
        # both sum up to 450 terms in float32
        torch.testing.assert_close(fast, plain, rtol=0, atol=450 * 2.0**-24 * plain.abs().max().item())
    expected_calls = 0 if library.isa() == "portable" else 1
    assert len(calls) == expected_calls
    layer.backend = "auto"
    layer(x.detach()).sum().backward()
    assert len(calls) == 2 * expected_calls
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.detach().clone()))


@pytest.mark.parametrize(
    ("stride", "inputs", "outputs", "calls"),
    [(1, 5, 9, 0), (1, 16, 17, 2), (2, 16, 17, 0), (2, 32, 33, 1), (2, 32, 400, 0)],
)
def test_algorithm(stride, inputs, outputs, calls, monkeypatch):
    """Winograd's algorithm for the output, and for the gradient of x with stride 1; not where the weight is large."""
    if library.isa() == "portable":
        pytest.skip("PyTorch's convolutions are the faster ones")
    found = []
    run = conv.convolve
    monkeypatch.setattr(conv, "convolve", lambda *given: found.append(1) or run(*given))
    layer, x = Conv3x3(inputs, outputs, stride), torch.randn(2, 30, 29, inputs, requires_grad=True)
    layer.backend = "native"
    layer(x).sum().backward()
    assert len(found) == calls


def test_second_derivatives():
    layer = Conv3x3(2, 3)
    x = torch.randn(1, 14, 14, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    layer.backend = "torch"
    (plain,) = torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)
    (expected,) = torch.autograd.grad(plain.square().sum(), x)
    torch.testing.assert_close(second, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_half_precision_stays_pytorchs():
    layer, x = Conv3x3(3, 4).bfloat16(), torch.randn(1, 14, 14, 3, dtype=torch.bfloat16)
    plain = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), layer.weight, layer.bias, padding=1)
    assert torch.equal(layer(x), plain.permute(0, 2, 3, 1))


def test_named_backend_is_not_replaced():
    x, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 14, 14, 3), (4, 3, 3, 3)))
    with pytest.raises(backends.BackendUnavailableError, match="float64"):
        conv3x3(x, weight, None, backend="native")


def test_kernels_are_excluded():
    layer = Conv3x3(2, 3)
    x = torch.randn(1, 14, 14, 2)
    results = [outputs_and_gradients(lambda x: layer(x), [x])]
    with backends.excluding("native"):
        results.append(outputs_and_gradients(lambda x: layer(x), [x]))
    assert all(map(torch.equal, *results))

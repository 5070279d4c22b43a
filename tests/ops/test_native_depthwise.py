"""The native depthwise convolution and rotary split against the plain composition in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F

from ppma.ops import backends, depthwise, rotary
from ppma.ops.backends.native import library
from ppma.testing import assert_accurate, outputs_and_gradients

pytestmark = pytest.mark.native


def composition(x, weight, bias, base=None, *, gelu=False):
    values = F.gelu(x) if gelu else x
    out = F.conv2d(values.movedim(-1, 1), weight, bias, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    return out.movedim(1, -1) + (values if base is None else base)


def inputs(shape, kernel, with_base=True):
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(shape, generator=generator)
    weight = torch.randn(shape[-1], 1, kernel, kernel, generator=generator)
    bias = torch.randn(shape[-1], generator=generator)
    return [x, weight, bias, *([torch.randn(shape, generator=generator)] if with_base else [])]


def roundings(shape, kernel):
    """A tap's gradient sums all tokens; an output its taps; GELU and its slope some 20 operations."""
    return shape[0] * shape[1] * shape[2] + kernel * kernel + 32


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("shape", [(2, 5, 6, 32), (1, 1, 9, 16), (3, 7, 1, 5), (1, 1, 1, 1), (2, 9, 4, 80)], ids=str)
def test_depthwise_accuracy(shape, kernel, with_base, gelu):
    assert backends.kernels_serve("auto", "depthwise_conv", torch.zeros(1))
    fast, exact = (functools.partial(f, gelu=gelu) for f in (depthwise.depthwise_conv, composition))
    assert_accurate(fast, exact, inputs(shape, kernel, with_base), roundings(shape, kernel))


@pytest.mark.parametrize("isa", library.INSTRUCTION_SETS)
def test_every_instruction_set(isa, monkeypatch):
    if isa not in library.INSTRUCTION_SETS[library.INSTRUCTION_SETS.index(library.isa()) :]:
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setattr(library, "forced_isa", isa)
    shape = (2, 6, 7, 40)
    fast, exact = (functools.partial(f, gelu=True) for f in (depthwise.depthwise_conv, composition))
    assert_accurate(fast, exact, inputs(shape, 3), roundings(shape, 3))


def then_linear(x, taps, offsets, weight, bias):
    return F.linear(composition(x, taps, offsets, gelu=True), weight, bias)


@pytest.mark.parametrize("shape", [(2, 5, 6, 32), (1, 1, 9, 16), (3, 7, 1, 5), (1, 1, 1, 1), (66, 4, 4, 70)], ids=str)
def test_depthwise_linear_accuracy(isa, shape):
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(7, shape[-1], generator=generator), torch.randn(7, generator=generator)
    tensors = [*inputs(shape, 3, with_base=False), weight, bias]
    # A weight's gradient sums what an output already is the sum of.
    fast = functools.partial(depthwise.depthwise_linear, backend="native")
    assert_accurate(fast, then_linear, tensors, roundings(shape, 3) + shape[-1])


@pytest.mark.parametrize("leaf", [0, 1])
def test_depthwise_linear_frozen_and_without_biases(leaf):
    """Only x or the taps have a gradient."""
    tensors, weight = inputs((2, 5, 6, 32), 3, with_base=False)[:2], torch.randn(7, 32)

    def only(function, tensor):
        x, taps = (tensor if place == leaf else given.to(tensor) for place, given in enumerate(tensors))
        return function(x, taps, None, weight.to(tensor), None)

    fast, exact = (functools.partial(only, f) for f in (depthwise.depthwise_linear, then_linear))
    assert_accurate(fast, exact, tensors[leaf : leaf + 1], roundings((2, 5, 6, 32), 3) + 32)


def test_depthwise_linear_empty_batch(isa):
    tensors = [*inputs((0, 4, 5, 8), 3, with_base=False), torch.randn(3, 8), torch.randn(3)]
    out, *gradients = outputs_and_gradients(functools.partial(depthwise.depthwise_linear, backend="native"), tensors)
    assert out.shape == (0, 4, 5, 3)
    assert all((gradient == 0).all() for gradient in gradients[1:])


@pytest.mark.parametrize("shape", [(150, 2, 3, 20), (66, 4, 4, 70)], ids=str)
@pytest.mark.parametrize("kernel", [3, 5])
def test_depthwise_groups_of_images(shape, kernel):
    """More than one small image in a task, and a smaller last group."""
    fast, exact = (functools.partial(f, gelu=True) for f in (depthwise.depthwise_conv, composition))
    assert_accurate(fast, exact, inputs(shape, kernel), roundings(shape, kernel))


def test_depthwise_packed_slice():
    packed = torch.randn(2, 5, 6, 96)
    x = packed[..., 64:].requires_grad_()
    weight = torch.randn(32, 1, 5, 5)
    torch.testing.assert_close(depthwise.depthwise_conv(x, weight, None), composition(x, weight, None))
    transposed = torch.randn(2, 32, 5, 6).movedim(1, -1)
    torch.testing.assert_close(
        depthwise.depthwise_conv(transposed, weight, None), composition(transposed, weight, None)
    )


def test_bits_any_threads():
    for shape in [(1, 20, 9, 32), (8, 6, 5, 64), (1, 9, 9, 100), (2, 6, 5, 64)]:
        results = []
        before = torch.get_num_threads()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(
                outputs_and_gradients(functools.partial(depthwise.depthwise_conv, gelu=True), inputs(shape, 3))
            )
        torch.set_num_threads(before)
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two)


def test_gelu_accuracy(isa):
    """Within 3e-7 max(1, |x|) of float64 everywhere, seen through a convolution that does nothing."""
    x = torch.linspace(-12, 12, 100_000).view(1, 1, -1, 1)
    zero = torch.zeros(1, 1, 3, 3)
    exact = F.gelu(x.double())
    error = (depthwise.depthwise_conv(x, zero, None, gelu=True).double() - exact).abs()
    assert (error / x.abs().clamp_min(1)).max() < 3e-7
    tail = (x < -1) & (x > -4)
    assert (error[tail] / exact[tail].abs()).max() < 2e-6


def test_gelu_far_out(isa):
    """The input or 0, with slope 1 or 0; NaN for NaN."""
    x = torch.tensor([-torch.inf, -1e30, -20.0, 0.0, 20.0, 1e30, 0.0, 0.0, torch.nan])
    leaf = x.view(1, 1, -1, 1).clone().requires_grad_()
    out = depthwise.depthwise_conv(leaf, torch.zeros(1, 1, 3, 3), None, gelu=True)
    (slope,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    apart = slice(0, 7)  # the convolution multiplies the neighbours of NaN by 0
    torch.testing.assert_close(out.flatten()[apart], x.clamp(min=0)[apart], rtol=0, atol=1e-37)
    far = [1, 2, 4, 5]
    torch.testing.assert_close(slope.flatten()[far], (x[far] > 0).float(), rtol=0, atol=1e-37)
    assert out.flatten()[-1].isnan()
    assert slope.flatten()[-1].isnan()


def test_opcheck():
    x, weight, bias, base = (t.requires_grad_() for t in inputs((2, 4, 5, 8), 3))
    for gelu in (False, True):
        torch.library.opcheck(torch.ops.ppma.depthwise_conv.default, (x, weight, bias, base, gelu))
        torch.library.opcheck(torch.ops.ppma.depthwise_conv.default, (x, weight, None, None, gelu))


def test_graph_capture(monkeypatch):
    """A captured graph must not depend on a library that its reader may lack."""
    x, weight, bias, base = inputs((1, 4, 5, 8), 3)

    class Local(torch.nn.Module):
        def forward(self, x):
            return depthwise.depthwise_conv(x, weight, bias, base)

    graph = torch.export.export(Local(), (x,)).graph
    assert not any("ppma" in str(node.target) for node in graph.nodes)
    with torch.autocast("cpu", torch.bfloat16):
        assert not backends.kernels_serve("auto", "depthwise_conv", x)
    assert backends.resolve("auto", "polyline_scan", x.device, x.dtype)


@pytest.mark.parametrize(("heads", "d"), [(2, 16), (3, 10), (1, 2), (4, 32)])
def test_rotary_split_accuracy(heads, d):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 5, 3 * heads * d, generator=generator)
    angle = 10 * torch.rand(5, d // 2, generator=generator, dtype=torch.float64)
    cos, sin = angle.cos().float(), angle.sin().float()

    def split(packed):
        assert backends.kernels_serve("auto", "rotary_split", packed) is (packed.dtype == torch.float32)
        q, k, v = rotary.rotary_split(packed, heads, cos.to(packed), sin.to(packed))
        return torch.cat([q, 2 * k, 3 * v], -1)

    assert_accurate(split, split, [packed], roundings=4)


def test_rotary_split_second_derivatives():
    """Through the gradient of the kernel, which is linear in what it is given."""
    angle = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float32, torch.float64):
        packed = torch.linspace(-2.0, 2.0, 5 * 48, dtype=dtype).view(1, 5, 48).requires_grad_()
        q, k, v = rotary.rotary_split(packed, 2, angle.cos().to(dtype), angle.sin().to(dtype))
        (slope,) = torch.autograd.grad((q * k * v).sum(), packed, create_graph=True)
        found += torch.autograd.grad(slope.square().sum(), packed)
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-5, atol=1e-5)


def test_rotary_split_pairs():
    """In complex numbers: (x[2m] + i x[2m+1]) times exp(i angle)."""
    packed = torch.randn(1, 4, 3 * 8)
    angle = torch.rand(4, 2)
    q, k, v = rotary.rotary_split(packed, 2, angle.cos(), angle.sin())
    for turned, given in zip((q, k), packed.unflatten(-1, (3, 2, 4)).unbind(2), strict=False):
        pairs = torch.view_as_complex(given.unflatten(-1, (2, 2)).contiguous())
        expected = torch.view_as_real(pairs * torch.polar(torch.ones(4, 1, 2), angle[:, None])).flatten(-2)
        torch.testing.assert_close(turned, expected)
    assert v.data_ptr() == packed[..., 16:].data_ptr()

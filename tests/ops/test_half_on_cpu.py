"""Half precision on the CPU: the native kernels on float32 copies, with results in the dtypes of the inputs."""

import copy

import pytest
import timm
import torch

import ppma
from ppma.ops import backends, depthwise, rotary
from ppma.ops.fused_conv import fused_conv
from ppma.ops.fused_linear import fused_linear

pytestmark = pytest.mark.native

HALF = [torch.bfloat16, torch.float16]
ATTENTIONS = [ppma.polyline_attention, ppma.criss_cross_attention, ppma.linear_attention]


def attention_inputs(dtype, grid=(3, 4)):
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(2, 2, *grid, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    decays = [(-torch.rand(2, 2, *grid, generator=generator)).requires_grad_() for _ in range(2)]
    return [*values, *decays]


def check_close(actual, exact, dtype):
    """Both were computed in float32 from the same values; the result and what the backward pass reads are rounded."""
    assert actual.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (actual.float() - exact).abs().max() <= 4 * eps * exact.abs().max()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("function", ATTENTIONS)
def test_attention(function, dtype, monkeypatch):
    monkeypatch.setattr(backends.pytorch, function.__name__, lambda *_: pytest.fail("ran in plain PyTorch"))
    half = attention_inputs(dtype)
    wide = [tensor.detach().float().requires_grad_() for tensor in half]
    out, exact = function(*half), function(*wide)
    check_close(out, exact, dtype)
    cotangent = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
    out.backward(cotangent)
    exact.backward(cotangent.float())
    for a, b in zip(half[:3], wide[:3], strict=True):
        check_close(a.grad, b.grad, dtype)
    for a, b in zip(half[3:], wide[3:], strict=True):  # of sums of values rounded to half precision
        assert a.grad.dtype == torch.float32
        assert (a.grad - b.grad).abs().max() <= 12 * torch.finfo(dtype).eps * b.grad.abs().max()


@pytest.mark.parametrize("dtype", HALF)
def test_scan(dtype):
    *_, x, log_alpha, log_beta = attention_inputs(dtype)
    wide = x.detach().float().requires_grad_()
    out, exact = (ppma.polyline_scan(value, log_alpha, log_beta, backend="native") for value in (x, wide))
    check_close(out, exact, dtype)
    out.float().sum().backward()
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("dtype", HALF)
def test_block_operators(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 6, 8, generator=generator), torch.randn(8, 1, 3, 3, generator=generator)
    x, weight = (tensor.to(dtype).requires_grad_() for tensor in (x, weight))
    assert backends.kernels_serve("auto", "depthwise_conv", x)
    out = depthwise.depthwise_conv(x, weight, None, gelu=True)
    check_close(out, depthwise.depthwise_conv(x.float(), weight.float(), None, gelu=True), dtype)
    out.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (dtype, dtype)
    packed, angles = torch.randn(2, 5, 48, generator=generator).to(dtype), torch.rand(5, 4)
    halves = rotary.rotary_split(packed, 2, angles.cos(), angles.sin())
    for half, exact in zip(halves, rotary.rotary_split(packed.float(), 2, angles.cos(), angles.sin()), strict=True):
        check_close(half, exact, dtype)


def test_fused_linear_packed_weight_kept():
    x, weight, bias = torch.randn(40, 16), torch.randn(24, 16), torch.randn(24)
    packed = {}
    with torch.no_grad():
        half = [tensor.bfloat16() for tensor in (x, weight, bias)]
        out = fused_linear(*half, norm_eps=1e-6, packed=packed)
        check_close(out, fused_linear(*(tensor.float() for tensor in half), norm_eps=1e-6), torch.bfloat16)
    assert "float32" in packed


def test_model_bfloat16():
    torch.manual_seed(0)
    model, images = timm.create_model("ppma_nano", num_classes=10).eval(), torch.randn(2, 3, 32, 32)
    half = copy.deepcopy(model).bfloat16()
    with torch.inference_mode():
        exact, fast = model(images), ppma.optimize_for_inference(half)(images.bfloat16())
        assert fast.dtype == half(images.bfloat16()).dtype == torch.bfloat16
        # Some 60 layers in a row, each with a relative rounding of eps / 2.
        assert (fast.float() - exact).norm() < 60 * torch.finfo(torch.bfloat16).eps / 2 * exact.norm()
    out = half.train()(images.bfloat16())
    out.float().square().mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in half.parameters())


@pytest.mark.parametrize("dtype", HALF)
def test_optimized_model_computes_in_float32(dtype):
    """Stem and stages in one call: the result is rounded once, at its end."""
    torch.manual_seed(0)
    half = ppma.optimize_for_inference(timm.create_model("ppma_nano").to(dtype))
    wide = copy.deepcopy(half).float()
    images = torch.randn(3, 3, 32, 32).to(dtype)
    for model in (half, wide):
        model.set_backend("native")
    with torch.inference_mode():
        expected = wide.forward_features(images.float()).to(dtype)
        torch.testing.assert_close(half.forward_features(images), expected, rtol=0, atol=0)
        half.stages[0].blocks[0].position.weight.mul_(2)
        assert not torch.equal(half.forward_features(images), expected)


def test_optimized_model_refuses_another_dtype():
    half = ppma.optimize_for_inference(timm.create_model("ppma_nano").bfloat16())
    with torch.inference_mode(), pytest.raises((RuntimeError, ValueError)):
        half(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("dtype", HALF)
def test_fused_conv_half(dtype):
    x, weight, bias = torch.randn(2, 7, 6, 32), torch.randn(48, 32, 3, 3), torch.randn(48)
    half, packed = [tensor.to(dtype) for tensor in (x, weight, bias)], {}
    with torch.no_grad():
        for _ in range(2):  # measured, and chosen
            out = fused_conv(*half, gelu=True, packed=packed)
            check_close(out, fused_conv(*(tensor.float() for tensor in half), gelu=True), dtype)

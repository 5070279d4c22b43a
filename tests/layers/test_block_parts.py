import pytest
import torch
import torch.nn.functional as F

from ppma.layers import ConvFeedForward, Downsample, PolylineBlock, Stem
from ppma.layers.convolution import DepthwiseConv


def test_depthwise_conv_layout():
    conv = DepthwiseConv(8, 3)
    x = torch.randn(2, 5, 6, 8)
    out = conv(x)
    assert out.is_contiguous()
    expected = F.conv2d(x.permute(0, 3, 1, 2), conv.weight, conv.bias, padding=1, groups=8)
    torch.testing.assert_close(out, expected.permute(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("stride", "size", "grid"), [(4, (32, 48), (8, 12)), (4, (33, 7), (9, 2)), (2, (33, 8), (17, 4))]
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_stem_any_image(stride, size, grid, memory_format):
    stem = Stem(3, 16, stride).eval()
    out = stem(torch.randn(2, 3, *size).to(memory_format=memory_format))
    assert out.shape == (2, *grid, 16)
    assert out.is_contiguous()


def test_downsample_rounding():
    out = Downsample(8, 12)(torch.randn(2, 5, 4, 8))
    assert out.shape == (2, 3, 2, 12)
    assert out.is_contiguous()


def test_feed_forward_formula():
    ffn = ConvFeedForward(8, 24).double()
    x = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    hidden = F.gelu(F.linear(x, ffn.expand.weight, ffn.expand.bias))
    conv = F.conv2d(hidden.permute(0, 3, 1, 2), ffn.local.weight, ffn.local.bias, padding=1, groups=24)
    expected = F.linear(hidden + conv.permute(0, 2, 3, 1), ffn.reduce.weight, ffn.reduce.bias)
    torch.testing.assert_close(ffn(x), expected)


def test_block_formula():
    block = PolylineBlock(16, 2, kind="criss_cross", layer_scale=0.5).double()
    x = torch.randn(2, 3, 4, 16, dtype=torch.float64)
    y = x + block.position(x)
    y = y + 0.5 * block.attn(F.layer_norm(y, (16,), block.attn_norm.weight, block.attn_norm.bias, 1e-6))
    y = y + 0.5 * block.ffn(F.layer_norm(y, (16,), block.ffn_norm.weight, block.ffn_norm.bias, 1e-6))
    torch.testing.assert_close(block(x), y)


@pytest.mark.parametrize("formulation", ["paper", "release"])
@pytest.mark.parametrize("kind", ["full", "criss_cross", "linear", "decomposed"])
def test_block_valid_is_cropping(kind, formulation):
    """Rows of padding at the bottom, whatever they hold: the raster indices of the others stay the same."""
    block = PolylineBlock(16, 2, kind=kind, formulation=formulation).double().eval()
    x = torch.randn(2, 6, 5, 16, dtype=torch.float64)
    valid = torch.zeros(2, 6, 5, dtype=torch.bool)
    valid[:, :4] = True
    torch.testing.assert_close(block(x, valid=valid)[:, :4], block(x[:, :4]))


def test_block_drop_path():
    block = PolylineBlock(16, 2, drop_path=1.0 - 1e-9)
    x = torch.randn(4, 3, 4, 16)
    torch.testing.assert_close(block.train()(x), x + block.position(x))
    assert not torch.allclose(block.eval()(x), x + block.position(x))


def test_linear_initialisation():
    block = PolylineBlock(64, 2)
    for layer in (block.attn.qkv, block.attn.proj, block.ffn.expand, block.ffn.reduce):
        assert 0.019 < layer.weight.std() < 0.021
        assert layer.bias.abs().max() == 0

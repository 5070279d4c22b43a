"""The packed 3x3 convolutions against PyTorch in float64, on every instruction set that this CPU has."""

import pytest
import torch

from ppma.ops import fused_conv as module
from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.native.fused_conv import uses_winograd
from ppma.ops.fused_conv import fused_conv

pytestmark = pytest.mark.native

# Batch, height, width, inputs, outputs: single pixels and rows, no whole tile or vector, several panels and bands,
# blocks that begin inside an image and end in another. With 16 channels and more, those of stride 1 run by Winograd's
# algorithm, with 32 those of stride 2 too.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 1, 9, 3, 5),
    (3, 8, 1, 2, 17),
    (2, 7, 7, 19, 40),
    (1, 30, 33, 5, 24),
    (1, 61, 120, 36, 16),
    (1, 1, 1, 16, 16),
    (2, 5, 1, 17, 16),
    (1, 2, 150, 16, 33),
    (1, 1, 1, 32, 32),
    (2, 1, 37, 32, 33),
    (3, 4, 1, 40, 32),
    (5, 9, 6, 35, 40),
    (7, 13, 14, 48, 70),
    (1, 31, 52, 32, 32),
]


def make(batch, height, width, inputs, outputs):
    generator = torch.Generator().manual_seed(height + width)
    shapes = ((batch, height, width, inputs), (outputs, inputs, 3, 3), (outputs,))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def exact(x, weight, bias, **options):
    return fused_conv(x.double(), weight.double(), bias.double(), **options, backend="torch")


def bound(winograd_magnitudes, x, weight, bias, stride, gelu):
    """A sum of 9 C terms is off by at most as many roundings of the sum of their magnitudes.

    Winograd's algorithm sums C products of two numbers that had three roundings together: an input one along each axis,
    a weight one, as its transform is in float64. Five more come behind them, two along each axis and one with the bias.
    Both strides have as many.
    GELU has slopes below 1.13 and an error of its own of 3e-7 * max(1, |x|) (csrc/gelu.h).
    """
    magnitudes = exact(x.abs(), weight.abs(), bias.abs(), stride=stride)
    limit = 2.0**-24 * (9 * x.shape[-1] + 8) * magnitudes
    if uses_winograd(weight, stride):
        limit = 2.0**-24 * (x.shape[-1] + 16) * winograd_magnitudes(x, weight, bias, stride)
    return 1.13 * limit + 3e-7 * magnitudes.clamp(min=1) if gelu else limit


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("gelu", [False, True])
def test_accuracy(isa, winograd_magnitudes, shape, stride, gelu):
    tensors, options = make(*shape), {"stride": stride, "gelu": gelu}
    result = fused_conv(*tensors, **options, backend="native")
    expected = exact(*tensors, **options)
    assert result.shape == expected.shape
    assert ((result.double() - expected).abs() <= bound(winograd_magnitudes, *tensors, **options)).all()


@pytest.mark.parametrize(("channels", "stride"), [(4, 1), (16, 1), (4, 2), (32, 2)])
def test_strided_input(isa, channels, stride):
    x, weight, bias = make(2, 6, 5, channels, 8 * channels)

    def run(x):
        return fused_conv(x, weight, bias, stride=stride, backend="native")

    expected = run(x)
    channels_first = x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    wide = torch.cat((x, x), -1)[..., :channels]
    assert torch.equal(run(channels_first), expected)
    assert torch.equal(run(wide), expected)
    assert torch.equal(run(x[:1].expand(2, -1, -1, -1)), expected[:1].expand(2, -1, -1, -1))


@pytest.mark.parametrize("shape", [(2, 40, 23, 16, 48), (3, 40, 23, 32, 130), (1, 9, 11, 32, 300)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_any_number_of_threads(isa, shape, stride):
    tensors = make(*shape)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(fused_conv(*tensors, stride=stride, gelu=True, backend="native"))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


def test_images_do_not_depend_on_one_another(isa):
    """A block of tiles may span several of them."""
    x, weight, bias = make(5, 13, 14, 32, 32)
    result = fused_conv(x, weight, bias, stride=2, backend="native")
    for image in range(len(x)):
        assert torch.equal(fused_conv(x[image : image + 1], weight, bias, stride=2, backend="native")[0], result[image])


def test_default_device(isa):
    """Tensors made on the way are on the CPU, whatever the default."""
    tensors = make(1, 6, 6, 16, 16)
    expected = fused_conv(*tensors, backend="native")
    with torch.device("meta"):
        assert torch.equal(fused_conv(*tensors, backend="native"), expected)


def test_empty_batch(isa):
    x, weight, bias = make(1, 4, 4, 3, 5)
    assert fused_conv(x[:0], weight, bias, stride=2, backend="native").shape == (0, 2, 2, 5)


@pytest.mark.parametrize("channels", [16, 32])
def test_packed_weights_of_both_strides(isa, channels):
    """One dictionary may serve both: each algorithm and stride packs the weight differently."""
    x, weight, bias = make(1, 6, 6, channels, channels)
    kept = {}
    for stride in (1, 2, 1, 2):
        result = fused_conv(x, weight, bias, stride=stride, packed=kept, backend="native")
        assert torch.equal(result, fused_conv(x, weight, bias, stride=stride, backend="native"))


@pytest.mark.parametrize("channels", [3, 32])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("pixel", [3, 4, 5, 6])
def test_nan_reaches_its_neighbours_only(isa, channels, stride, pixel):
    """Wherever it lies in a tile."""
    x, weight, bias = make(1, 9, 9, channels, channels)
    x[0, pixel, pixel, 0] = torch.nan
    found = fused_conv(x, weight, bias, stride=stride, gelu=True, backend="native").isnan().any(-1)[0]
    near = (torch.arange(0, 9, stride) - pixel).abs() <= 1
    assert torch.equal(found, near[:, None] & near)


def test_unsupported(isa):
    x, weight, bias = make(1, 4, 4, 3, 5)
    with pytest.raises(BackendUnavailableError, match="expected a 3x3 convolution with stride 1 or 2"):
        fused_conv(x, weight, bias, stride=3, backend="native")
    with pytest.raises(BackendUnavailableError, match="fused_conv has no gradient"):
        fused_conv(x.requires_grad_(), weight, bias, backend="native")
    fused_conv(x, weight, bias).sum().backward()
    assert x.grad is not None


def test_choice(isa, monkeypatch, winograd_magnitudes):
    tensors = make(2, 6, 5, 4, 8)
    for name in ("packed", "torch"):
        monkeypatch.setattr(module, "_choices", {})
        monkeypatch.setattr(module, "fastest", lambda candidates, name=name: name)
        with torch.no_grad():
            result = fused_conv(*tensors)
        assert list(module.choices().values()) == [name]
        assert ((result.double() - exact(*tensors)).abs() <= bound(winograd_magnitudes, *tensors, 1, False)).all()

"""The native scans against the reference in float64: values, every gradient, any grid, any strides, any thread."""

import pytest
import torch

import ppma
from ppma.ops.backends.native import library
from ppma.testing import GRIDS, assert_accurate, outputs_and_gradients, random_log_decay

pytestmark = pytest.mark.native

PATHS = ["forward", "reverse", "both"]
LINES = [(1,), (2,), (9,)]
VOLUMES = [(2, 3, 4), (3, 1, 2), (1, 4, 1), (2, 2, 1, 3), (1, 2, 3, 2)]


def scan(paths="both", backend="native"):
    """The scan as a function of x and one log-decay for each axis."""
    return lambda x, *log_decays: ppma.polyline_scan_nd(x, log_decays, paths=paths, backend=backend)


def inputs(grid, channels, batch=(2,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, *grid, channels, generator=generator)
    return [x, *(random_log_decay(*batch, *grid, generator=generator) for _ in grid)]


def roundings(grid):
    """A chain of n products has a relative error of n roundings; two chains meet along each axis."""
    return 2 * sum(grid) + 8


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("grid", [*LINES, *GRIDS, *VOLUMES], ids=str)
def test_accuracy(grid, paths):
    channels = 3 if len(grid) < 4 else 1
    assert_accurate(scan(paths), scan(paths, "reference"), inputs(grid, channels), roundings(grid))


@pytest.mark.parametrize("channels", [1, 4, 7, 8, 16, 17, 40, 67])
def test_accuracy_any_channels(channels):
    assert_accurate(scan(), scan(backend="reference"), inputs((3, 4), channels, batch=()), roundings((3, 4)))


@pytest.mark.parametrize("isa", library.INSTRUCTION_SETS)
@pytest.mark.parametrize("grid", [(9,), (5, 6), (2, 3, 4)], ids=str)
def test_every_instruction_set(grid, isa, monkeypatch):
    if isa not in library.INSTRUCTION_SETS[library.INSTRUCTION_SETS.index(library.isa()) :]:
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setattr(library, "forced_isa", isa)
    for paths in PATHS:
        assert_accurate(scan(paths), scan(paths, "reference"), inputs(grid, 21, batch=()), roundings(grid))


@pytest.mark.parametrize(
    ("grid", "channels"),
    [
        ((3000,), 5),
        ((140, 256), 3),  # gradients in several blocks of rows
        ((2, 700), 33),
        ((40, 3, 130), 20),  # the first axis in pieces of columns
    ],
    ids=str,
)
def test_accuracy_large_grid(grid, channels):
    """Against the PyTorch backend in float64, which is the reference to 11 digits where that can be had."""
    assert_accurate(scan(), scan(backend="torch"), inputs(grid, channels, batch=()), roundings(grid))


@pytest.mark.parametrize("log_decay", [0.0, -torch.inf, -1e-4])
def test_constant_decays(log_decay):
    """All ones (plain sums of whole lines), all zeros (nothing but the token itself), and nearly ones."""
    grid = (11, 13)
    x, *_ = inputs(grid, 5)
    decays = [torch.full((2, *grid), log_decay) for _ in grid]
    assert_accurate(scan(), scan(backend="torch"), [x, *decays], roundings(grid))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 7.0])
@pytest.mark.parametrize("grid", [(5,), (4, 5), (3, 2, 4)], ids=str)
def test_edges_outside_grid(grid, value):
    tensors = inputs(grid, 6)
    before = outputs_and_gradients(scan(), tensors)
    for axis, log_decay in enumerate(tensors[1:]):
        log_decay.select(axis + 1, 0).fill_(value)
    after = outputs_and_gradients(scan(), tensors)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)
    for axis, gradient in enumerate(after[2:]):
        assert not gradient.select(axis + 1, 0).any()


def strided(tensor, kind):
    """The same values in another memory layout."""
    if kind == "channels first":
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    if kind == "transposed grid":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "every other":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]
    return torch.cat([torch.full_like(tensor, torch.nan), tensor], -1)[..., tensor.shape[-1] :]


@pytest.mark.parametrize("kind", ["channels first", "transposed grid", "every other", "slice"])
@pytest.mark.parametrize("channels", [16, 21])
def test_bits_any_strides(kind, channels):
    x, *decays = inputs((6, 7), channels)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))

    def run(*tensors):
        x, grad, *decays = (tensor.unsqueeze(1) for tensor in tensors)
        out = torch.ops.ppma.polyline_scan(x, decays, "both", "native")
        return [out, *torch.ops.ppma.polyline_scan_backward(grad, x, decays, "both", "native")]

    plain = run(x, grad, *decays)
    other = run(strided(x, kind), strided(grad, kind), *(strided(decay, "slice") for decay in decays))
    for a, b in zip(plain, other, strict=True):
        assert b.is_contiguous()
        assert torch.equal(a, b)


def test_expanded_inputs():
    x, log_beta, log_alpha = inputs((4, 5), 6, batch=())
    expanded = [x.expand(2, 3, *x.shape), log_beta.expand(2, 3, 4, 5), log_alpha.expand(2, 3, 4, 5)]
    copies = [tensor.contiguous() for tensor in expanded]
    for a, b in zip(*(outputs_and_gradients(scan(), tensors) for tensors in (expanded, copies)), strict=True):
        assert torch.equal(a, b)
    x.requires_grad_()
    scan()(x, log_beta, log_alpha).sum().backward()  # the gradient of a sum is one number, expanded
    exact = x.detach().double().requires_grad_()
    scan(backend="reference")(exact, log_beta.double(), log_alpha.double()).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def with_threads(threads, function):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("grid", "channels", "batch"),
    [((33, 20), 16, ()), ((8, 9), 40, (5,)), ((7,), 100, ()), ((150, 256), 8, ()), ((3, 4, 5), 6, (2,))],
    ids=str,
)
def test_bits_any_threads(grid, channels, batch):
    tensors = inputs(grid, channels, batch)
    one, two, three = (with_threads(threads, lambda: outputs_and_gradients(scan(), tensors)) for threads in (1, 2, 3))
    for a, b, c in zip(one, two, three, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_bits_python_threads(assert_bits_in_python_threads):
    assert_bits_in_python_threads(scan(), [inputs((12, 10 + seed), 5, seed=seed) for seed in range(6)])


def test_bits_after_fork(assert_bits_after_fork):
    assert_bits_after_fork(scan(), inputs((12, 14), 32))


def test_log_decays_in_float64():
    x, *decays = inputs((4, 5), 3)
    wide = [decay.double() for decay in decays]
    out, grad_x, *grad_decays = outputs_and_gradients(scan(), [x, *wide])
    assert out.dtype == grad_x.dtype == torch.float32
    assert all(gradient.dtype == torch.float64 for gradient in grad_decays)
    torch.testing.assert_close(out, scan()(x, *decays))


def test_empty():
    x, log_beta, log_alpha = torch.zeros(0, 3, 4, 5), torch.zeros(0, 3, 4), torch.zeros(0, 3, 4)
    assert scan()(x, log_beta, log_alpha).shape == x.shape


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("grid", [(4,), (3, 4), (2, 2, 3)], ids=str)
def test_opcheck(grid, paths):
    x, *decays = (tensor.unsqueeze(1) for tensor in inputs(grid, 3))
    x.requires_grad_()
    torch.library.opcheck(
        torch.ops.ppma.polyline_scan.default, (x, [d.requires_grad_() for d in decays], paths, "native")
    )
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.ppma.polyline_scan_backward.default, (x.detach(), x.detach(), decays, paths, "native")
        )

"""Scans along any axis of any grid."""

import sys

import pytest
import torch
from triton_cases import DEVICE, PATHS, ROUNDINGS, assert_kernels_accurate

import ppma
import ppma.ops.backends.triton
from ppma.testing import assert_accurate, outputs_and_gradients, random_log_decay

scan = sys.modules["ppma.ops.backends.triton.scan"]


def scan_inputs(grid, channels, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, *grid, channels, generator=generator).to(dtype)
    decays = (random_log_decay(1, 2, *grid, generator=generator) for _ in grid)
    return [tensor.to(DEVICE) for tensor in (x, *decays)]


@pytest.mark.parametrize("paths", PATHS)
def test_grid(paths):
    assert_kernels_accurate(ppma.polyline_scan, scan_inputs((4, 5), 3), paths=paths)


@pytest.mark.parametrize(
    ("grid", "channels", "paths", "dtype"),
    [
        ((19,), 3, "forward", torch.float32),  # three chunks
        ((2, 17), 3, "both", torch.bfloat16),
        ((9, 2), 10, "reverse", torch.float16),  # two chunks, two blocks of channels
        ((2, 3, 2), 3, "both", torch.float32),
    ],
)
def test_chunks_and_axes(grid, channels, paths, dtype, monkeypatch):
    monkeypatch.setattr(scan, "LONGEST_CHUNK", 8)
    monkeypatch.setattr(scan, "WIDEST_BLOCK", 8)

    def run(backend):
        return lambda x, *decays: ppma.polyline_scan_nd(x, decays, paths=paths, backend=backend)

    assert_accurate(run("triton"), run("reference"), scan_inputs(grid, channels, dtype), ROUNDINGS)


@pytest.mark.usefixtures("triton_scan")
def test_own_scan_of_the_interpreter():
    assert_kernels_accurate(ppma.polyline_scan, scan_inputs((2, 3), 2), paths="2d")


def test_strides():
    """Heads in between, expanded decays."""
    x = torch.randn(1, 3, 4, 2, 5, device=DEVICE).movedim(-2, 1)
    log_beta = random_log_decay(3, 4).to(DEVICE).expand(1, 2, 3, 4)
    log_alpha = random_log_decay(1, 2, 4, 3).to(DEVICE).mT
    given = (x, log_alpha, log_beta)
    expected = ppma.polyline_scan(*(tensor.contiguous() for tensor in given), backend="torch")
    torch.testing.assert_close(ppma.polyline_scan(*given, backend="triton"), expected)


def test_empty_batch():
    x, log_alpha, log_beta = (tensor[:0] for tensor in scan_inputs((2, 3), 2))
    out, *grads = outputs_and_gradients(lambda *t: ppma.polyline_scan(*t, backend="triton"), (x, log_alpha, log_beta))
    assert out.shape == x.shape
    assert [grad.shape for grad in grads] == [x.shape, log_alpha.shape, log_beta.shape]
